"""This process among the ranks: their groups, inputs, and checks that all do the same."""
