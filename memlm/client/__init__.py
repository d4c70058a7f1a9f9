"""The clients of a server, plain and awaited. Importing them loads neither torch, Faiss nor gRPC."""

from memlm.client.aio_client import AsyncClient
from memlm.client.client import Client
from memlm.client.resume import Tls

__all__ = ["AsyncClient", "Client", "Tls"]
