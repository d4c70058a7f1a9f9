"""The gRPC front end: calls, streams, authentication."""
