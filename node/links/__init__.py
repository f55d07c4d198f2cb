"""Measuring the links to other nodes."""
