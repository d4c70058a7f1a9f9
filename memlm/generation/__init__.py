"""The engine: steps of generation, batches, sampling, sessions and scoring."""
