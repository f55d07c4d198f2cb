"""Partners, exchanges and the outer step at the end of a round."""
