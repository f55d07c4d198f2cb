"""Trying a setting without a swarm: how long synchronising takes, and how well it learns."""
