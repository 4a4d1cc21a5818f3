"""Plans and frontiers as HTML pages, each in one file."""
