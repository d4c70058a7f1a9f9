"""The gRPC service: a front end for clients, inference workers with the model, and index workers."""
