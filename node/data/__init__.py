"""Text, tokens and the part that is held out."""
