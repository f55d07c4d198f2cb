"""The language of peers: manifest, messages, records, tensor codecs and the transports.

Knows nothing of training and imports nothing else of this project.
"""
