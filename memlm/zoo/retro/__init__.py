"""RETRO (arXiv 2112.04426): a decoder reads the chunks of a datastore that are near its own."""
