"""A whole swarm of real processes on this machine: `noloco swarm`."""
