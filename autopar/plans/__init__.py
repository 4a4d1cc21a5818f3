"""Plans: requests, decisions, estimates, and the files that hold them."""
