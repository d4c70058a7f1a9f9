"""The gRPC service: a front that speaks to clients, and a worker that owns the model."""
