"""What prices read, measured on the devices at hand, with all ranks at work at once."""
