"""Peers: their keys, addresses and signed records."""
