"""What every choice costs, in seconds and bytes."""
