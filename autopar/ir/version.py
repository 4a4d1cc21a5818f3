"""The one place that states autopar's version."""

__version__ = "0.1.0"
