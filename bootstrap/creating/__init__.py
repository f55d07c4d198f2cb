"""Founding a run: its manifest, keys, tokenizer and seed peer; what `noloco-bootstrap` does."""
