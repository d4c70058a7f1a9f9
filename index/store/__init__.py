"""A datastore on disk: segments, a manifest, and commits that a crash leaves whole."""
