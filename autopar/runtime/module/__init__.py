"""The compiled module: calls of it, its parameters and optimizers, and libraries that use it."""
