"""The HTTP port: OpenAI's calls, datastores, health and metrics, through the same service as gRPC."""
