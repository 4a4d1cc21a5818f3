"""Training runs that others published, beside what autopar predicts of them."""
