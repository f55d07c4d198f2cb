"""A run: its manifest, signed by its owner, and what the manifest refers to."""
