"""Faults on purpose: `noloco swarm --chaos SEED`."""
