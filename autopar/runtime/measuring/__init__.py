"""Measures the profile that prices are read from, on the devices of all ranks at once."""
