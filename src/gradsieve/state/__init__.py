"""What outlasts a run, and what must be the same on all workers."""
