"""Numbers, bytes and durations as people read them."""

from __future__ import annotations

import math

TIME_UNITS = (("min", 60, 90 * 60), ("h", 3600, 48 * 3600), ("days", 86_400, math.inf))  # in seconds, and up to where


def figure(value: float, digits: int = 4) -> str:
    """A number in some digits, with commas, and with a power of ten only where it has more than 15 digits."""
    if not math.isfinite(value) or value == 0 or not 1e-6 <= abs(value) < 1e15:
        return f"{value:,.{digits}g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    shown = f"{value:,.{places}f}"
    return shown.rstrip("0").rstrip(".") if places else shown


def file_size(num_bytes: float) -> str:
    """A number of bytes in the unit that leaves three digits or less before the point."""
    size = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{figure(size, 3)} {unit}"


def duration(seconds: float) -> str:
    """A time in the unit that a person would name it in, with two digits or more."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    name, unit_s = next((unit for unit in TIME_UNITS if seconds < unit[2]), TIME_UNITS[-1])[:2]
    count = seconds / unit_s
    return f"{count:.2g} {name}" if count < 10 else f"{count:,.0f} {name}"


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 document`, `2,000 entries`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("y") else f"{number:,} {noun}s"
