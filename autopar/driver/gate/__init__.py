"""The gate: golden plans, made again and compared."""
