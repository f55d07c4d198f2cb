"""Which node should serve which stage, for a scenario or a running swarm: `noloco plan`."""
