"""What travels between workers: collectives, exchanges made of them, how values are written, and what it costs."""
