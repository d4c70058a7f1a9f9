"""The workers, which own the model, and the front's handles on them."""
