"""What peers say to each other: manifest, messages, records, tensor codecs and the transports.

Knows nothing of training and imports nothing else of this project.
"""
