"""Checkpoints, and checks that all workers have the same settings and parameters."""
