"""The twins of attention within buckets: float64, one query, head and round at a time."""

import numpy as np
from memory_twins import softmax
from zoo.differential_twins import places
from zoo.draw_twins import normal

from memlm.zoo.lsh import LSH
from memlm.zoo.routing import Routing


def shared(twin, layer, x):
    """The vectors (T, H, d) that queries and keys share, and the values."""
    c = twin.config
    both = twin.linear(f"blocks.{layer}.attention.qkv", x).reshape(len(x), 2, c.num_heads, c.head_dim)
    return both[:, 0], both[:, 1]


def attended(twin, layer, x, query, key, value, sees):
    """Attention over the places sees(t, h), with one key a head."""
    prefix, c = f"blocks.{layer}.attention.", twin.config
    out = np.zeros((len(x), c.num_heads, c.head_dim))
    for t in range(len(x)):
        for h in range(c.num_heads):
            seen = sorted(sees(t, h))
            weights = softmax([twin.score(layer, h, query[t, h] * c.query_scale, key[s, h], t, s) for s in seen])
            read = [value[s, h] + twin.value_shift(prefix, t, s) for s in seen]
            out[t, h] = sum(w * v for w, v in zip(weights, read, strict=True))
    return twin.linear(prefix + "out", out.reshape(len(x), -1))


def last(tokens, span):
    return tokens[-span:] if span else tokens


def lsh(twin, part, layer, x):
    query, value = shared(twin, layer, x)
    d, half, sinks = twin.config.head_dim, part.buckets // 2, twin.config.num_sinks
    bucket = {}
    for h in range(twin.config.num_heads):
        for number in range(part.rounds):
            turn = [[normal(part.seed, layer, h, number, i, a) for a in range(half)] for i in range(d)]
            for t in range(len(x)):
                turned = query[t, h] @ np.array(turn)
                bucket[t, h, number] = int(np.argmax([*turned, *-turned]))

    def sees(t, h):
        before = [s for s in places(twin, layer, t) if s != t]
        seen = {s for s in before if s < sinks}
        for number in range(part.rounds):
            same = [s for s in before if s >= sinks and bucket[s, h, number] == bucket[t, h, number]]
            seen |= set(last(same, part.span))
        return seen or {t}

    key = query / np.linalg.norm(query, axis=2, keepdims=True)
    return attended(twin, layer, x, query, key, value, sees)


def routed(twin, part, layer, x):
    vector, value = shared(twin, layer, x)
    centred = vector - vector.mean(axis=2, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=2, keepdims=True) + 1e-5)
    centroids, sinks = twin.w[f"blocks.{layer}.attention.centroid_KCd"], twin.config.num_sinks

    def cluster(t, h):
        cosines = [normed[t, h] @ m / np.linalg.norm(m) for m in centroids[h - part.local_heads]]
        return int(np.argmax(cosines))

    clusters = {(t, h): cluster(t, h) for t in range(len(x)) for h in range(part.local_heads, twin.config.num_heads)}

    def sees(t, h):
        around = places(twin, layer, t)
        if h < part.local_heads:
            return [s for s in around if s < sinks or t - s < part.local_window]
        same = [s for s in around if s >= sinks and clusters[s, h] == clusters[t, h]]
        return {*last(same, part.span), *(s for s in around if s < sinks)}

    return attended(twin, layer, x, normed, normed, value, sees)


MIXERS = {LSH: lsh, Routing: routed}
