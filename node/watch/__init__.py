"""Reports of a node on itself: log, events, trace, numbers."""
