"""Column generation, for flows and more choices than one integer program takes."""
