"""Access: who may be in a private run, and what one peer may hold here."""
