"""Work on several machines, on Ray."""
