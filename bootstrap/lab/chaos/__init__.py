"""Disturbing a local swarm: what `noloco swarm --chaos` does to its nodes."""
