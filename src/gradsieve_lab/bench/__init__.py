"""Measurements of speed and memory. They write rows; tables and plots are made from the rows."""
