"""The search for a plan: over meshes, counts, and the stages of a pipeline."""
