"""The way of a microbatch through this node and on to the next stage."""
