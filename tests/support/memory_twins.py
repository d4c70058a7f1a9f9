"""The slow, sure twin of a decoder with memories: float64, one query, head and key at a time.

It knows nothing of states, places, masks or steps. For a text it says which tokens each position may read where, from
the papers' definitions alone, and computes attention over just those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from memlm.model import Compression, Decoder


@dataclass
class Read:
    """What position t of a layer reads: keys, values and positions of local and compressed places, and of memory."""

    local: list[tuple[np.ndarray, np.ndarray, int]] = field(default_factory=list)
    remembered: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)


class Twin:
    """Reads whole texts with the weights of a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self.config = decoder.config
        self.w = {name: tensor.detach().double().numpy() for name, tensor in decoder.weights().items()}
        self.attention_paid: dict[tuple[int, int], float] = {}

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Logits (T, V) of one document."""
        c = self.config
        x = self.w["embedding.weight"][tokens] * c.embedding_scale
        if c.positions == "learned":
            x = x + self.w["positions.weight"][np.arange(len(tokens)) % c.context_length]
        if c.positions == "sinusoidal":
            x = x + np.array([sinusoid(t, c.dim) for t in range(len(tokens))])
        x = self.stack(x)
        if c.norm_order != "post":
            x = self.norm("norm", x)
        return x @ self.w["embedding.weight" if c.tied_embeddings else "head.weight"].T

    def stack(self, x: np.ndarray) -> np.ndarray:
        """What all layers make of the embedded text (T, D)."""
        for layer in range(self.config.num_layers):
            x = self.layer(layer, x)
        return x

    def layer(self, layer: int, x: np.ndarray) -> np.ndarray:
        prefix, c = f"blocks.{layer}.", self.config
        if c.norm_order == "post":
            x = self.norm(prefix + "attention_norm", x + self.attend(layer, x))
            return self.norm(prefix + "ff_norm", x + self.feed_forward(prefix, x))
        if c.norm_order == "output":
            x = x + self.norm(prefix + "attention_norm", self.attend(layer, x))
            return x + self.norm(prefix + "ff_norm", self.feed_forward(prefix, x))
        if c.norm_order == "sandwich":
            mixed = self.attend(layer, self.norm(prefix + "attention_norm", x))
            x = x + self.norm(prefix + "attention_out_norm", mixed)
            changed = self.feed_forward(prefix, self.norm(prefix + "ff_norm", x))
            return x + self.norm(prefix + "ff_out_norm", changed)
        attended = x + self.attend(layer, self.norm(prefix + "attention_norm", x))
        read = x if c.parallel_residual else attended
        return attended + self.feed_forward(prefix, self.norm(prefix + "ff_norm", read))

    def feed_forward(self, prefix: str, x: np.ndarray) -> np.ndarray:
        c = self.config
        if c.activation == "swiglu":
            gate, up = np.split(self.linear(prefix + "ff.gate_up", x), 2, axis=-1)
            hidden = gate / (1 + np.exp(-gate)) * up
        elif c.activation == "geglu":
            gate, up = np.split(self.linear(prefix + "ff.gate_up", x), 2, axis=-1)
            hidden = F.gelu(torch.from_numpy(gate), approximate="tanh").numpy() * up
        else:
            up = self.linear(prefix + "ff.up", x)
            hidden = {
                "relu": lambda: np.maximum(up, 0),
                "gelu": lambda: F.gelu(torch.from_numpy(up)).numpy(),
                "gelu_tanh": lambda: F.gelu(torch.from_numpy(up), approximate="tanh").numpy(),
            }[c.activation]()
        return self.linear(prefix + "ff.down", hidden)

    def attend(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Attention of one layer over the whole text, position by position."""
        c, prefix = self.config, f"blocks.{layer}.attention."
        H, d = c.num_heads, c.head_dim
        out = np.zeros((len(x), H, d))
        compressed: dict[int, list[np.ndarray]] = {}
        for t in range(len(x)):
            floor, evicted = self.floor_at(t)
            if c.compression and floor not in compressed:
                compressed[floor] = self.compress(layer, x, floor, out)
            for h in range(H):
                q, _, _ = self.heads(prefix, x[t], h)
                places = []
                for position, state in self.local_places(layer, t, h, floor, x, compressed.get(floor, [])):
                    _, k, v = self.heads(prefix, state, h)
                    places.append((k, v, position))
                memory = [self.heads(prefix, x[s], h)[1:] for s in evicted] if c.memorizes(layer) else []
                out[t, h] = self.read(layer, h, t, q, places, memory)
        return self.linear(prefix + "out", out.reshape(len(x), -1))

    def floor_at(self, t: int) -> tuple[int, list[int]]:
        """The oldest token that position t still reads as itself, and those that memory holds by then."""
        c = self.config
        if not c.is_segmented:
            return 0, []
        floor = 0
        for border in range(c.context_length, t + 1, c.context_length):
            group = span_of(c.compression) if c.compression else 1
            floor += max(0, border - c.xl_length - floor) // group * group
        first = max(0, floor - c.memorizing.capacity) if c.memorizing else 0
        return floor, list(range(first, floor))

    def local_places(self, layer: int, t: int, h: int, floor: int, x: np.ndarray, compressed: list[np.ndarray]):
        """Positions and states of compressed and local places that head h of t may see."""
        c = self.config
        window, sinks = c.window_of(layer), c.num_sinks
        for number, state in enumerate(compressed):
            yield floor - len(compressed) + number, state
        for s in range(floor, t + 1):
            if s < sinks or ((not window or t - s < window) and self.sees(layer, t, s, h)):
                yield s, x[s]

    def sees(self, layer: int, t: int, s: int, h: int) -> bool:
        """Whether head h looks from t to s <= t. Twins of patterns say more."""
        return True

    def compress(self, layer: int, x: np.ndarray, floor: int, out: np.ndarray) -> list[np.ndarray]:
        """All tokens before `floor`, compressed group by group; the newest are kept."""
        c, prefix = self.config.compression, f"blocks.{layer}.compressor."
        compressed: list[np.ndarray] = []
        if c.kind == "most_used":
            for begin, end in self.evictions(floor):
                use = [self.attention_paid.get((layer, s), 0.0) for s in range(begin, end)]
                best = sorted(np.argsort(use)[::-1][: (end - begin) // c.rate])
                compressed += [x[begin + place] for place in best]
            return compressed[-c.length :]
        span = span_of(c)
        for begin in range(0, floor, span):
            if c.kind == "linear":
                for weights in self.w[prefix + "places_rn"]:
                    compressed.append(sum(weight * x[begin + place] for place, weight in enumerate(weights)))
                continue
            apart = c.dilation if c.kind == "dilated" else 1
            for offset in range(apart):
                group = [x[begin + offset + apart * tap] for tap in range(c.rate)]
                if c.kind == "mean":
                    compressed.append(sum(group) / c.rate)
                elif c.kind == "max":
                    compressed.append(np.max(group, axis=0))
                else:
                    kernel = self.w[prefix + "kernel_OIc"]
                    compressed.append(
                        sum(kernel[:, :, tap] @ state for tap, state in enumerate(group)) + self.w[prefix + "bias_O"]
                    )
        return compressed[-c.length :]

    def evictions(self, floor: int) -> list[tuple[int, int]]:
        """The runs of tokens that left together, up to `floor`."""
        c, runs, done = self.config, [], 0
        for border in range(c.context_length, 10**6, c.context_length):
            upto = done + max(0, border - c.xl_length - done) // c.compression.rate * c.compression.rate
            if done >= floor:
                return runs
            if upto > done:
                runs.append((done, upto))
            done = upto
        raise AssertionError

    def heads(self, prefix: str, state: np.ndarray, h: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Query, key and value of one state for head h."""
        c = self.config
        d, group = c.head_dim, h // (c.num_heads // c.num_kv_heads)
        projected = self.linear(prefix + "qkv", state).reshape(-1, d)
        q, k, v = projected[h], projected[c.num_heads + group], projected[c.num_heads + c.num_kv_heads + group]
        if c.qk_norm and c.qk_norm_over == "projection":
            queries, keys = projected[: c.num_heads].flatten(), projected[c.num_heads :][: c.num_kv_heads].flatten()
            q = self.rms(prefix + "query_norm", queries).reshape(-1, d)[h]
            k = self.rms(prefix + "key_norm", keys).reshape(-1, d)[group]
        elif c.qk_norm:
            q, k = self.rms(prefix + "query_norm", q), self.rms(prefix + "key_norm", k)
        q = q * c.query_scale
        if prefix + "knn.log_scale_H" in self.w and c.memorizing.normalize == "both":
            q, k = self.normalized_query(prefix, q, h), k / np.linalg.norm(k)
        return q, k, v

    def normalized_query(self, prefix: str, q: np.ndarray, h: int) -> np.ndarray:
        return q / np.linalg.norm(q) * np.exp(self.w[prefix + "knn.log_scale_H"][h]) * math.sqrt(len(q))

    def read(self, layer: int, h: int, t: int, q, places, memory) -> np.ndarray:
        """One head's mixture at one position."""
        c, prefix, d = self.config, f"blocks.{layer}.attention.", self.config.head_dim
        scores = [self.score(layer, h, q, k, t, position) for k, _, position in places]
        values = [v + self.value_shift(prefix, t, position) for _, v, position in places]
        found = []
        if memory:
            query = q
            if c.memorizing.normalize == "memory":
                query = self.normalized_query(prefix, q, h)
                memory = [(k / np.linalg.norm(k), v) for k, v in memory]
            found = sorted(((query @ k / math.sqrt(d), number) for number, (k, _) in enumerate(memory)), reverse=True)
            found = [(score, memory[number][1]) for score, number in found[: c.memorizing.top_k]]
        if found and c.memorizing.mixing == "joint":
            weights = softmax([*scores, *(score for score, _ in found)])
            return sum(w * v for w, v in zip(weights, [*values, *(v for _, v in found)], strict=True))
        weights = softmax(scores)
        for weight, (_, _, position) in zip(weights, places, strict=True):
            if position >= self.floor_at(t)[0]:  # what is compressed already is not compressed again
                self.attention_paid[layer, position] = self.attention_paid.get((layer, position), 0.0) + weight
        local = sum(w * v for w, v in zip(weights, values, strict=True))
        if not found:
            return local
        remembered = sum(w * v for w, (_, v) in zip(softmax([s for s, _ in found]), found, strict=True))
        gate = self.w[prefix + "knn.gate_H"][h]
        share = np.tanh(gate) if c.memorizing.mixing == "tanh" else 1 / (1 + np.exp(-gate))
        return share * remembered + (1 - share) * local

    def score(self, layer: int, h: int, q, k, t: int, position: int) -> float:
        """The score of a key at `position` for the query at t."""
        c, d, prefix = self.config, self.config.head_dim, f"blocks.{layer}.attention."
        distance = t - position
        if c.num_sinks and position < c.num_sinks:
            distance = min(t, c.num_sinks + max(c.windows) - 1) - position
        if c.positions == "rotary" and layer not in c.no_rope_layers:
            is_local = c.local_rope_theta and c.window_of(layer)
            scale = c.rope_scaling.factor if c.rope_scaling and not is_local else 1.0
            theta = c.local_rope_theta if is_local else c.rope_theta
            return turn(q, distance / scale, theta, c.rotary_dim) @ k / math.sqrt(d)
        if c.positions == "transformer_xl":
            p = prefix + "positions."
            wave = (self.w[p + "project.weight"] @ sinusoid(distance, c.dim)).reshape(c.num_heads, d)[h]
            return ((q + self.w[p + "u_Hd"][h]) @ k + (q + self.w[p + "v_Hd"][h]) @ wave) / math.sqrt(d)
        if c.positions == "shaw":
            return q @ (k + self.w[prefix + "positions.keys.weight"][min(distance, c.max_distance)]) / math.sqrt(d)
        if c.positions == "distance":
            w, v = self.w[prefix + "positions.slope_H"][h], self.w[prefix + "positions.bound_H"][h]
            return max(q @ k, 0) / math.sqrt(d) * (1 + np.exp(v)) / (1 + np.exp(v - w * distance))
        plain = q @ k / math.sqrt(d)
        if c.positions == "alibi":
            assert c.num_heads in (2, 4)
            return plain - 2.0 ** (-8 * (h + 1) / c.num_heads) * distance
        if c.positions == "t5":
            return plain + self.w["relative_bias.table.weight"][bucket(distance, c.num_buckets, c.max_distance), h]
        return plain

    def value_shift(self, prefix: str, t: int, position: int) -> np.ndarray | float:
        if self.config.positions != "shaw":
            return 0.0
        return self.w[prefix + "positions.vectors.weight"][min(t - position, self.config.max_distance)]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.w[name + ".weight"].T + self.w.get(name + ".bias", 0.0)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        if self.config.norm != "layer":
            return self.rms(name, x)
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.config.norm_eps)
        return scaled * self.w[name + ".weight"] + self.w[name + ".bias"]

    def rms(self, name: str, x: np.ndarray) -> np.ndarray:
        weight = self.w[name + ".weight"] + (1 if self.config.norm == "rms_offset" else 0)
        return rms(x, weight, self.config.norm_eps)


def span_of(compression: Compression) -> int:
    """How many states are compressed together."""
    apart = {"dilated": compression.dilation, "linear": compression.states}
    return compression.rate * apart.get(compression.kind, 1)


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def softmax(scores: list[float]) -> np.ndarray:
    raised = np.exp(np.array(scores) - max(scores))
    return raised / raised.sum()


def sinusoid(position: int, dim: int) -> np.ndarray:
    angles = [position / 10_000 ** (2 * i / dim) for i in range(dim // 2)]
    return np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])


def turn(q: np.ndarray, distance: float, theta: float, size: int) -> np.ndarray:
    """The query as if its key stood at position 0."""
    half = size // 2
    pairs = q[:half] + 1j * q[half:size]
    turned = pairs * np.exp(1j * distance * theta ** (-2 * np.arange(half) / size))
    return np.concatenate([turned.real, turned.imag, q[size:]])


def bucket(distance: int, num_buckets: int, max_distance: int) -> int:
    """T5's own table: exact for the near half, logarithmic beyond (arXiv 1910.10683, section 2.1)."""
    exact = num_buckets // 2
    if distance < exact:
        return distance
    far = exact + int(math.log(distance / exact) / math.log(max_distance / exact) * (num_buckets - exact))
    return min(far, num_buckets - 1)
