"""A corpus into a datastore, measured and tuned."""
