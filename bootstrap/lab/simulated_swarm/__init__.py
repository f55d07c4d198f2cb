"""`noloco simulate swarm`: thousands of peers under a virtual clock, with the daemon's own decisions."""
