"""Flows, and more choices than one integer program takes: a part is solved exactly."""
