"""Exchange of weights between workers that each train a replica of their own."""
