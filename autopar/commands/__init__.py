"""The commands of the command line, a file each; each imports what it needs when it runs."""
