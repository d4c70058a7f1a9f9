"""The twin of HyperAttention: float64, one query, head and run of blocks at a time."""

import math

import numpy as np
from zoo.draw_twins import drawn, normal

from memlm.zoo.hyper import Hyper


def gray_order(bits):
    """All tuples of signs, each next one with one sign changed."""
    if not bits:
        return [()]
    shorter = gray_order(bits - 1)
    return [(0, *signs) for signs in shorter] + [(1, *signs) for signs in reversed(shorter)]


def runs(block):
    """The complete runs (first block, blocks) before a block, the longest first."""
    found, begin = [], 0
    for level in reversed(range(block.bit_length())):
        if block >> level & 1:
            found.append((begin, 1 << level))
            begin += 1 << level
    return found


def read_of(part, layer, h, t, own, hashes):
    """The tokens that t reads of its past, and how often each counts."""
    size, reads = part.block, dict.fromkeys(range(t // part.block * part.block, t + 1), 1)
    for begin, blocks in runs(t // size):
        keys = sorted(range(begin * size, (begin + blocks) * size), key=lambda s: (hashes[s], s))
        before = sum(hashes[s] < own for s in keys)
        middle = (before + sum(hashes[s] <= own for s in keys)) // 2
        rest = len(keys) - size
        first = min(max(middle - size // 2, 0), rest)
        for s in keys[first : first + size]:
            reads[s] = 1
        others, count = keys[:first] + keys[first + size :], min(part.samples, rest)
        for number in range(count):
            stretch = others[number * rest // count : (number + 1) * rest // count]
            draw = drawn(part.seed, 1, layer, h, t, int(math.log2(blocks)), number)
            reads[stretch[draw % len(stretch)]] = len(stretch)
    return reads


def hashed(vector, plane, order):
    return order[tuple(int(number > 0) for number in vector @ np.array(plane))]


def hyper(twin, part, layer, x):
    prefix, c = f"blocks.{layer}.attention.", twin.config
    order = {signs: place for place, signs in enumerate(gray_order(part.projections))}
    out = np.zeros((len(x), c.num_heads, c.head_dim))
    for h in range(c.num_heads):
        group = h // (c.num_heads // c.num_kv_heads)
        plane = [[normal(part.seed, layer, group, i, p) for p in range(part.projections)] for i in range(c.head_dim)]

        parts = [twin.heads(prefix, x[t], h) for t in range(len(x))]
        keys = [hashed(k, plane, order) for _, k, _ in parts]
        for t, (q, _, _) in enumerate(parts):
            reads = read_of(part, layer, h, t, hashed(q, plane, order), keys)
            raised = {s: times * np.exp(twin.score(layer, h, q, parts[s][1], t, s)) for s, times in reads.items()}
            values = {s: parts[s][2] + twin.value_shift(prefix, t, s) for s in reads}
            out[t, h] = sum(raised[s] * values[s] for s in reads) / sum(raised.values())
    return twin.linear(prefix + "out", out.reshape(len(x), -1))


MIXERS = {Hyper: hyper}
