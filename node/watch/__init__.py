"""A node's reports on itself: log, events, trace, numbers."""
