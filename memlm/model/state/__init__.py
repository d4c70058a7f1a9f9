"""The state of a decoder: the KV cache of the rows of a batch."""
