"""A stage's state: on disk, and over the network to newcomers."""
