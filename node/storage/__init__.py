"""Storage: what a node keeps on its disk from one start to the next."""
