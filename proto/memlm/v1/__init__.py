"""The wire contract, as `protoc` generated it from the .proto files beside it (`make proto`)."""
