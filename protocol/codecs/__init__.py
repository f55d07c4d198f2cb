"""Codecs: tensors as bytes, exact and lossy, on the host and on a GPU."""
