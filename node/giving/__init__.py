"""The part of a machine that a volunteer gives, and when."""
