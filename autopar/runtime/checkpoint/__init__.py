"""Values of whole tensors, in and out of files and memory."""
