"""A plan as a page: `summary` gathers its figures, `text` lays them out for a terminal."""
