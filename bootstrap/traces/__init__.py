"""Nodes' traces in numbers, and several as one: `noloco trace`."""
