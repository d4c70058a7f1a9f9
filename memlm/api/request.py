"""The base class of requests, which carries the type of the response."""

from __future__ import annotations

from typing import Generic, TypeVar

R = TypeVar("R", covariant=True)


class Request(Generic[R]):
    """A message of the contract that is answered with an `R`, by the library, the server and the clients alike."""

    __slots__ = ()
