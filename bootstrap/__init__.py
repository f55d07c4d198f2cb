"""How a swarm comes to be, is watched, run on one machine and exported. Imports `node` and `protocol`."""
