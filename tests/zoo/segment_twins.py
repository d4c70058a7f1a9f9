"""Twins of parts that hand something from one segment to the next, from the papers' definitions alone."""

from __future__ import annotations

import numpy as np
from memory_twins import softmax


def in_segments(twin, part, tokens):
    """Recurrent memory: each segment is read as [M; x; M], and the last M of its final states are the next M."""
    c, M, logits = twin.config, part.memories, []
    memory = twin.w["border.first_MD"]
    twin.older = [[] for _ in range(c.num_layers)]  # what a layer attends from earlier segments, by position
    for begin in range(0, len(tokens), c.context_length):
        x = twin.w["embedding.weight"][tokens[begin : begin + c.context_length]]
        floor = max(0, begin - c.xl_length)
        twin.positions = [*range(floor - M, floor), *range(begin, begin + len(x) + M)]
        x = np.concatenate([memory, x, memory])
        for layer in range(c.num_layers):
            x = twin.layer(layer, x)
        x = twin.norm("norm", x)
        logits.append(x[M:-M] @ twin.w["embedding.weight"].T)
        memory = x[-M:]
    return np.concatenate(logits)


def with_memory(twin, part, layer, x):
    """Attention within [M; x; M], and of all but the first M to the latest tokens of earlier segments."""
    c, M, prefix = twin.config, part.memories, f"blocks.{layer}.attention."
    out = np.zeros((len(x), c.num_heads, c.head_dim))
    for place, t in enumerate(twin.positions):
        for h in range(c.num_heads):
            q, _, _ = twin.heads(prefix, x[place], h)
            scores, values = [], []
            own, older = list(zip(twin.positions, x, strict=True))[: place + 1], twin.older[layer]
            front = twin.positions[0]  # patterns count the memory that reads itself from its own first vector
            for s, state in own if place < M else [*older, *own]:
                sees = twin.sees(layer, t - front, s - front, h) if place < M else twin.sees(layer, t, s, h)
                if sees or s < front + M <= t:
                    _, k, v = twin.heads(prefix, state, h)
                    scores.append(twin.score(layer, h, q, k, t, s))
                    values.append(v)
            out[place, h] = softmax(scores) @ np.stack(values)
    both = [*twin.older[layer], *zip(twin.positions[M:-M], x[M:-M], strict=True)]
    twin.older[layer] = both[-c.xl_length :] if c.xl_length else []
    return twin.linear(prefix + "out", out.reshape(len(x), -1))
