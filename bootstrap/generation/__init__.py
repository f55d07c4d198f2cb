"""Text from a model: from an export by plain transformers, or from a swarm's own replicas."""
