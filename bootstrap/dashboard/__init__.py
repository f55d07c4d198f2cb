"""The dashboard: what a swarm does, on a page, for Prometheus, TensorBoard and Weights & Biases."""
