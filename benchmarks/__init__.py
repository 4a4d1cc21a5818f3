"""What autopar is measured by. `python -m benchmarks` runs what a machine without a GPU can run."""
