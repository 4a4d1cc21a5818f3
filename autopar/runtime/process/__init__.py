"""The process among others: who they are, what they are handed, and that they do the same."""
