"""The order of a step: what a rank does when, from the decisions of a plan."""
