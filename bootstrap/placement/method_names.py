"""The names by which the searches are asked for; `methods` has them."""

from __future__ import annotations

NAMES = ("anneal", "genetic", "kernighan-lin", "greedy", "random")
DEFAULT = "anneal"
