"""Responses that are kept: each caller's own, the oldest first to go, never more bytes than allowed, and for a time."""

import asyncio
import random

import pytest
from running import PATIENCE_S

from memlm.errors import NotFound
from memlm.server.frontend.kept_responses import ENTRY_BYTES, KeptResponses

KIB = 1 << 10


def value(size: int) -> dict[str, str]:
    return {"text": "x" * size}


async def test_a_value_is_found_by_its_caller_alone() -> None:
    kept = KeptResponses()
    assert kept.put("ann", "a", {"text": "é", "list": [1, None]})
    assert kept.get("ann", "a") == {"text": "é", "list": [1, None]}
    for caller, name in (("ben", "a"), ("", "a"), ("ann", "b")):
        with pytest.raises(NotFound, match="no response"):
            kept.get(caller, name)
        with pytest.raises(NotFound):
            kept.remove(caller, name)
    kept.remove("ann", "a")
    with pytest.raises(NotFound):
        kept.get("ann", "a")
    assert kept.num_bytes == 0


async def test_a_callers_new_value_takes_the_place_of_its_oldest() -> None:
    kept = KeptResponses(max_bytes=64 * KIB)  # 16 KiB of a caller
    for name in "abcd":
        assert kept.put("ann", name, value(2900))
    kept.put("ben", "a", value(2900))
    kept.get("ann", "a")  # used
    assert kept.put("ann", "e", value(2900))
    with pytest.raises(NotFound):
        kept.get("ann", "b")
    assert [kept.get(*each)["text"][:1] for each in (("ann", "a"), ("ann", "c"), ("ann", "e"), ("ben", "a"))] == [
        "x"
    ] * 4


async def test_a_value_above_the_share_of_one_is_not_kept() -> None:
    kept = KeptResponses(max_bytes=64 * KIB)
    assert kept.put("ann", "a", value(2 * KIB))
    assert not kept.put("ann", "b", value(4 * KIB))
    assert kept.get("ann", "a")
    with pytest.raises(NotFound):
        kept.get("ann", "b")


async def test_the_bounds_hold_whatever_comes() -> None:
    """Where all together are full, the caller that holds the most gives way."""
    kept, rng, names = KeptResponses(max_bytes=64 * KIB), random.Random(0), [f"caller {number}" for number in range(9)]
    for number in range(2000):
        kept.put(rng.choice(names), str(number), value(rng.randrange(5 * KIB)))
        held = {name: kept._held.get(name, 0) for name in names}
        assert kept.num_bytes == sum(held.values()) <= 64 * KIB
        assert max(held.values()) <= 16 * KIB
        if number % 7 == 0 and (mine := kept._kept.get(names[0])):
            kept.remove(names[0], next(iter(mine)))
    assert kept.put("small", "a", value(10))
    for number in range(500):
        assert kept.put(names[number % 5], f"again {number}", value(2900))
    assert kept.get("small", "a")
    entries = [len(each.data) + ENTRY_BYTES for of_one in kept._kept.values() for each in of_one.values()]
    assert kept.num_bytes == sum(entries)


async def test_values_expire_after_their_last_use() -> None:
    async with asyncio.timeout(PATIENCE_S):
        await _check_expiry(KeptResponses(ttl_s=0.5))


async def _check_expiry(kept: KeptResponses) -> None:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    kept.put("ann", "a", value(1))
    kept.put("ben", "b", value(1))
    while loop.time() < begun_s + 0.3:
        await asyncio.sleep(0.05)
    used_s = loop.time()
    kept.get("ben", "b")
    while "ann" in kept._kept:
        await asyncio.sleep(0.01)
    assert loop.time() >= begun_s + 0.5
    while kept.num_bytes:
        await asyncio.sleep(0.01)
    assert loop.time() >= used_s + 0.5
    kept.put("ann", "a", value(1))  # the timer runs again
    while kept.num_bytes:
        await asyncio.sleep(0.01)
