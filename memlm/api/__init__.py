"""The requests and responses of the service as dataclasses, one module for each proto service."""
