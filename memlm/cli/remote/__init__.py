"""`memlm client`: the calls of the Python client from a shell."""
