"""What a setting would do, without a swarm: how long synchronising takes, and how well it learns."""
