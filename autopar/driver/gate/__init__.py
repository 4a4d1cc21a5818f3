"""The gate: golden plans, recomputed and compared."""
