"""What other libraries need to work with compiled models, where they have a place for it."""
