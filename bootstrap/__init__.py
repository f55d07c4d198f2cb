"""Founding, watching and exporting a swarm, and running one on a single machine. Imports `node` and `protocol`."""
