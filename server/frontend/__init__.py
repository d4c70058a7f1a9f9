"""The gRPC front: calls, streams and who may call."""
