"""What a node tells of itself: log, events, trace, numbers."""
