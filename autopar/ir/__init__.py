"""The values that pass between the parts of the compiler. Nothing here decides anything."""
