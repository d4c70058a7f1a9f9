"""Linear layers and whole steps as a processor computes them fastest, beside their plain twins."""
