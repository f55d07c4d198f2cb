"""Joining, who serves what, and moving to another stage."""
