"""Plans: what is asked for, what was decided, and the files that hold it."""
