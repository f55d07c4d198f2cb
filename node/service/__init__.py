"""Service at one stage: first state, training, and what the node says of it. What stays from stage to stage."""
