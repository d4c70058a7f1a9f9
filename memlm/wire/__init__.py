"""The dataclasses of `memlm.api` as protobuf messages, and errors as gRPC statuses."""
