"""Runs that compare sparsifiers."""
