"""Numbers of things, as messages say them."""


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 document`, `2,000 entries`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("y") else f"{number:,} {noun}s"
