"""Experiments that end in a verdict, one a module."""
