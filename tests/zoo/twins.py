"""The twins of parts: float64, one query, head and token at a time, from the papers' definitions alone.

A new part adds one entry to the table of its seam.
"""

from __future__ import annotations

import numpy as np
from memory_twins import Twin
from zoo import (
    bucket_twins,
    cross_twins,
    differential_twins,
    hyper_twins,
    infinite_twins,
    linear_twins,
    retro_twins,
    score_twins,
    stack_twins,
)
from zoo.draw_twins import drawn
from zoo.seam_parts import Carry, Decay, Fatigue, Gate, Repeated
from zoo.segment_twins import in_segments, with_memory

from memlm.model.attention.patterns import Pattern
from memlm.model.experts import Experts, HashExperts, Switch
from memlm.zoo.base_layers import Base
from memlm.zoo.demix.domains import Domains
from memlm.zoo.recurrent_memory import RecurrentMemory


class ZooTwin(Twin):
    """Reads whole texts, one document each, with the weights of a decoder that has parts."""

    def __init__(self, decoder, domain: int = 0) -> None:
        super().__init__(decoder)
        self.decoder, self.domain = decoder, domain

    def logits(self, tokens: list[int]) -> np.ndarray:
        self.tokens = tokens
        read = TEXTS.get(type(self.config.border))
        return super().logits(tokens) if read is None else read(self, self.config.border, tokens)

    def stack(self, x: np.ndarray) -> np.ndarray:
        stack = self.config.stack
        return super().stack(x) if stack is None else STACKS[type(stack)](self, stack, x)

    def layer(self, block: int, x: np.ndarray) -> np.ndarray:
        """A pre-norm layer whose sums are joins, or with a cross part between its sub-layers."""
        join, cross, prefix = self.config.join, self.config.cross, f"blocks.{block}."
        if cross is not None:
            x = x + self.attend(block, self.norm(prefix + "attention_norm", x))
            x = x + CROSSES[type(cross)](self, cross, block, x)
            return x + self.feed_forward(prefix, self.norm(prefix + "ff_norm", x))
        if join is None:
            return super().layer(block, x)
        add = JOINS[type(join)]
        attended = add(self, join, block, "attention", x, self.attend(block, self.norm(prefix + "attention_norm", x)))
        read = self.norm(prefix + "ff_norm", x if self.config.parallel_residual else attended)
        return add(self, join, block, "ff", attended, self.feed_forward(prefix, read))

    def attend(self, layer: int, x: np.ndarray) -> np.ndarray:
        mixer = self.config.layer_at(layer).mixer
        if type(mixer) in MIXERS:
            return MIXERS[type(mixer)](self, mixer, layer, x)
        if (border := self.config.border) is not None:
            return BORDERS[type(border)](self, border, layer, x)
        return super().attend(layer, x)

    def sees(self, layer: int, t: int, s: int, h: int) -> bool:
        mixer = self.config.layer_at(layer).mixer
        return PATTERNS[mixer.rule](mixer, t, s, h) or t == s if isinstance(mixer, Pattern) else True

    def feed_forward(self, prefix: str, x: np.ndarray) -> np.ndarray:
        layer = int(prefix.split(".")[1])
        channel = self.config.layer_at(layer).channel
        if channel is None or ".experts." in prefix:
            return super().feed_forward(prefix, x)
        return np.stack([CHANNELS[type(channel)](self, channel, layer, t, x[t]) for t in range(len(x))])

    def expert(self, layer: int, number: int, x: np.ndarray) -> np.ndarray:
        """What one expert makes of one vector. Its weights stand where the plain feed-forward's would."""
        inner = f"blocks.{layer}.ff.experts.{number}."
        gate, up = np.split(self.linear(inner + "gate_up", x), 2)
        return self.linear(inner + "down", gate / (1 + np.exp(-gate)) * up)


def sees_global(p, i, j, h):
    return i - j < p.window or j < p.num_global


def sees_random(p, i, j, h):
    here, there = i // p.block, j // p.block
    blocks = [drawn(p.seed, number, h, here) % here for number in range(p.num_random)] if here else []
    return sees_global(p, i, j, h) or there in blocks


PATTERNS = {
    "strided": lambda p, i, j, h: (i - j) % p.stride == 0 if h % 2 else i - j < p.stride,
    "fixed": lambda p, i, j, h: j % p.block >= p.block - p.summary if h % 2 else i // p.block == j // p.block,
    "dilated": lambda p, i, j, h: i - j < p.window * p.dilation and (i - j) % p.dilation == 0,
    "global": sees_global,
    "random": sees_random,
    "blocks": lambda p, i, j, h: i // p.block - j // p.block == h,
}


def routed(twin, part, layer, t, x):
    scores = twin.linear(f"blocks.{layer}.ff.router", x)
    p = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    best = sorted(range(part.experts), key=lambda e: -p[e])[: part.top]
    total = sum(p[e] for e in best) if part.normalize else 1.0
    return sum(p[e] / total * twin.expert(layer, e, x) for e in best)


def by_vector(twin, part, layer, t, x):
    scores = twin.linear(f"blocks.{layer}.ff.router", x)
    best = int(np.argmax(scores))
    return twin.expert(layer, best, x) / (1 + np.exp(-scores[best]))


def hashed(twin, part, layer, t, x):
    order = sorted(range(twin.config.vocab_size), key=lambda token: drawn(part.seed, layer, token))
    return twin.expert(layer, order.index(twin.tokens[t]) % part.experts, x)


def of_domain(twin, part, layer, t, x):
    return twin.expert(layer, twin.domain, x)


def decayed(twin, part, layer, x):
    prefix, total, read = f"blocks.{layer}.attention.", 0.0, []
    for row in twin.linear(prefix + "inner", x):
        total = part.rate * total + row
        read.append(total)
    return twin.linear(prefix + "out", np.stack(read))


def tired(twin, part, layer, x):
    prefix, c = f"blocks.{layer}.attention.", twin.config
    mark = twin.linear(prefix + "marks", x)
    out = np.zeros((len(x), c.num_heads, c.head_dim))
    for t in range(len(x)):
        for h in range(c.num_heads):
            q, _, _ = twin.heads(prefix, x[t], h)
            scores, values = [], []
            for s in range(twin.floor_at(t)[0], t + 1):
                _, k, v = twin.heads(prefix, x[s], h)
                tired = sum(max(0.0, mark[u, 1] * mark[s, 0]) for u in range(s + 1, t))
                scores.append(twin.score(layer, h, q, k, t, s) - tired)
                values.append(v)
            weights = np.exp(np.array(scores) - max(scores))
            out[t, h] = weights / weights.sum() @ np.stack(values)
    return twin.linear(prefix + "out", out.reshape(len(x), -1))


def gated(twin, part, block, sublayer, stream, change):
    if sublayer == "ff" and block == 0:
        return stream + change
    gate = twin.linear(f"blocks.{block}.{sublayer}_join.gate", stream)
    return stream + change / (1 + np.exp(-gate))


def carried(twin, part, layer, x):
    """Attention within a segment, and to the carried mean of the inputs before it. Without positions."""
    prefix, c = f"blocks.{layer}.attention.", twin.config
    out, mean = np.zeros((len(x), c.num_heads, c.head_dim)), np.zeros(c.dim)
    for begin in range(0, len(x), c.context_length):
        segment = x[begin : begin + c.context_length]
        for t in range(len(segment)):
            for h in range(c.num_heads):
                q, _, _ = twin.heads(prefix, segment[t], h)
                pairs = [twin.heads(prefix, state, h)[1:] for state in (mean, *segment[: t + 1])]
                scores = np.array([q @ k for k, _ in pairs]) / np.sqrt(c.head_dim)
                weights = np.exp(scores - scores.max())
                out[begin + t, h] = weights / weights.sum() @ np.stack([v for _, v in pairs])
        mean = segment.mean(axis=0) if begin == 0 else (mean + segment.mean(axis=0)) / 2
    return twin.linear(prefix + "out", out.reshape(len(x), -1))


def repeated(twin, part, x):
    for layer in range(twin.config.num_layers):
        x = twin.layer(layer % twin.config.num_blocks, x)
    return x


OF_FILES = (
    bucket_twins.MIXERS
    | differential_twins.MIXERS
    | hyper_twins.MIXERS
    | infinite_twins.MIXERS
    | linear_twins.MIXERS
    | score_twins.MIXERS
    | stack_twins.MIXERS
)
MIXERS = {Decay: decayed, Fatigue: tired, **OF_FILES}
CHANNELS = {Base: by_vector, Domains: of_domain, Experts: routed, Switch: routed, HashExperts: hashed}
JOINS = {Gate: gated, **stack_twins.JOINS}
STACKS = {Repeated: repeated, **stack_twins.STACKS}
CROSSES = {**cross_twins.CROSSES, **retro_twins.CROSSES}
BORDERS = {Carry: carried, RecurrentMemory: with_memory}
TEXTS = {RecurrentMemory: in_segments}  # borders through which a segment depends on the whole model's last one
