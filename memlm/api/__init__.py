"""The requests and answers of the service as dataclasses, one module for each proto service."""
