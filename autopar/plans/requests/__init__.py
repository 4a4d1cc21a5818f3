"""What is asked of a plan: options, constraints, strategies, and all that decides one."""
