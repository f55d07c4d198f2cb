"""Taking the model out: a Hugging Face checkpoint from the replicas of a running or finished swarm."""
