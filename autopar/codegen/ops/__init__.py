"""Ops whose ranks talk to one another while they compute: what each family writes."""
