"""The slice of the model that a node trains, and the thread that computes."""
