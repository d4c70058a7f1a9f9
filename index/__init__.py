"""The datastore."""
