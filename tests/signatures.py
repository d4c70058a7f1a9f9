"""Shapes and types in signatures, checked while tests run: all calls, or, for a quick look, the first of each test."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import jaxtyping
from beartype import beartype

CHECKED_CALLS = float(os.environ.get("CHECKED_CALLS", "inf"))  # of each test; a check costs more than most calls

_left = CHECKED_CALLS


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """What jaxtyping's import hook decorates with (pyproject.toml)."""
    check = beartype(function)

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global _left
        _left -= 1
        if _left < 0:
            jaxtyping.config.update("jaxtyping_disable", True)
        return check(*args, **kwargs)

    return counted


def check_again() -> None:
    """For the next test."""
    global _left
    _left = CHECKED_CALLS
    jaxtyping.config.update("jaxtyping_disable", False)
