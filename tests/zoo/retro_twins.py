"""The twin of RETRO: one token at a time, which looks up the neighbors of the chunk before it and encodes them anew."""

from __future__ import annotations

import numpy as np
from memory_twins import Twin, softmax, turn
from zoo.seam_parts import Told, told

THETA = 10_000.0


def retrieved(twin, part, block, stream):
    """What the tokens of a layer read: token t reads the neighbors of chunk (t + 1) // m - 1."""
    c, m = twin.config, part.chunk
    layers = part.layers or (c.num_layers - 1,)
    change = np.zeros_like(stream)
    if block not in layers:
        return change
    if block == min(layers):
        twin.asking = stream
    prefix, pairs = f"blocks.{block}.cross.", {}
    for t in range(len(stream)):
        number = (t + 1) // m - 1
        if number < 0:
            continue
        if number not in pairs:
            own, states = slice(number * m, number * m + m), []  # of all neighbors' tokens, each with its place
            for tokens in told(twin.tokens[own], part.neighbors, part.length):
                states += enumerate(encoded(twin, part, tokens, twin.asking[own])) if tokens else []
            pairs[number] = projected(twin, prefix, states, c.num_kv_heads)
        if pairs[number]:
            query = twin.linear(prefix + "query", twin.norm(prefix + "norm", stream[t]))
            place = m - 1 + (t + 1) % m
            change[t] = twin.linear(prefix + "out", read(twin, query, place, pairs[number], c.num_kv_heads))
    return change


def encoded(twin, part, tokens, asking):
    x = twin.w["embedding.weight"][tokens] * twin.config.embedding_scale
    for number in range(part.encoder_layers):
        prefix = f"cross.encoder.blocks.{number}."
        normed = twin.norm(prefix + "attention_norm", x)
        attended = x + looked(twin, prefix + "attention.", normed)
        if part.conditioned and number == 0:
            attended = attended + asked(twin, prefix + "cross.", attended, asking)
        own = x if twin.config.parallel_residual else attended
        x = attended + Twin.feed_forward(twin, prefix, twin.norm(prefix + "ff_norm", own))
    return twin.norm("cross.encoder.norm", x)


def looked(twin, prefix, x):
    """Attention of each token to all tokens of its text."""
    c = twin.config
    groups = range(0, c.num_heads, c.num_heads // c.num_kv_heads)  # a head of each
    pairs = [
        (place, *zip(*(twin.heads(prefix, state, h)[1:] for h in groups), strict=True)) for place, state in enumerate(x)
    ]
    queries = [np.concatenate([twin.heads(prefix, state, h)[0] for h in range(c.num_heads)]) for state in x]
    heads = [read(twin, query, t, pairs, c.num_kv_heads) for t, query in enumerate(queries)]
    return twin.linear(prefix + "out", np.stack(heads))


def asked(twin, prefix, stream, asking):
    states, H = list(enumerate(twin.norm(prefix + "asked_norm", asking))), twin.config.num_heads
    pairs, queries = (
        projected(twin, prefix, states, H),
        twin.linear(prefix + "query", twin.norm(prefix + "norm", stream)),
    )
    heads = [read(twin, query, t, pairs, H) for t, query in enumerate(queries)]
    return twin.linear(prefix + "out", np.stack(heads))


def projected(twin, prefix, states, num_kv_heads):
    """Place, keys and values of each state."""
    made = [(place, twin.linear(prefix + "key_value", state)) for place, state in states]
    return [(place, *both.reshape(2, num_kv_heads, -1)) for place, both in made]


def read(twin, query, place, pairs, num_kv_heads):
    """Attention of all heads of a query at a place to keys and values at places of their own."""
    c = twin.config
    heads = []
    for h, q in enumerate(query.reshape(c.num_heads, -1)):
        group = h // (c.num_heads // num_kv_heads)
        turns = {other: turn(q, place - other, THETA, c.head_dim) for other in {other for other, _, _ in pairs}}
        scores = [turns[other] @ keys[group] / np.sqrt(c.head_dim) for other, keys, _ in pairs]
        heads.append(softmax(scores) @ np.stack([values[group] for _, _, values in pairs]))
    return np.concatenate(heads)


CROSSES = {Told: retrieved}
