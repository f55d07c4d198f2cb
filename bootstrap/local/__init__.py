"""A whole swarm of real processes on this machine: `noloco swarm`."""

SUMMARY = "summary.json"  # in the swarm's folder, where --summary names no other
