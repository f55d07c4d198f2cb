"""The life of a node's process: joining, serving stages, orders, leaving."""
