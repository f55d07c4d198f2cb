"""Requests between peers: frames, streams, deadlines, and who is answered."""
