"""Whether planning arrives: large models of 2026, planned as a user would, with nothing said."""
