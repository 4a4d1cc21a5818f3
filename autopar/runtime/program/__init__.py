"""Programs of one rank, and which one a call runs."""
