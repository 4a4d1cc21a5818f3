"""Explanations: a plan's problem stated again, and solved with one thing changed."""
