"""Recorded training runs, and comparisons of methods."""
