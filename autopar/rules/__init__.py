"""What of each op can be sharded, and what it does with partial inputs."""
