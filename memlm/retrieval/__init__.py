"""Keys of a context, a search of the datastore, and the mixture of its answer with the model's."""
