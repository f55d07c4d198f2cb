"""Losses of a swarm, an export or a checkpoint on a text: `noloco eval`."""
