"""The slow, sure twins: each says in the plainest way what a fast path of memlm must equal."""

import numpy as np
import torch

from memlm.model import Decoder
from memlm.model.files.checkpoint import Checkpoint


def decode_plainly(decoder: Decoder, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities (T, V) and keys (T, D) of one sequence in float64: one position, head and key at a time."""
    weights = {name: tensor.double().numpy() for name, tensor in decoder.state_dict().items()}
    config = decoder.config
    residual = weights["embedding.weight"][tokens]
    for layer in range(config.num_layers):
        prefix = f"blocks.{layer}."
        normed = rms_norm(residual, weights[prefix + "attention_norm.weight"], config.norm_eps)
        residual = residual + attend_plainly(normed, weights, prefix + "attention.", config)
        keys = rms_norm(residual, weights[prefix + "ff_norm.weight"], config.norm_eps)
        gate, up = np.split(keys @ weights[prefix + "ff.gate_up.weight"].T, 2, axis=-1)
        residual = residual + (gate / (1 + np.exp(-gate)) * up) @ weights[prefix + "ff.down.weight"].T
    logits = rms_norm(residual, weights["norm.weight"], config.norm_eps) @ weights["embedding.weight"].T
    return log_softmax(logits), keys


def attend_plainly(normed: np.ndarray, weights: dict, prefix: str, config) -> np.ndarray:
    """Causal attention with rotary positions and grouped queries, in loops."""
    size, heads, groups = config.head_dim, config.num_heads, config.num_kv_heads
    projected = (normed @ weights[prefix + "qkv.weight"].T).reshape(len(normed), -1, size)
    mixed = np.zeros((len(normed), heads, size))
    for t in range(len(normed)):
        for h in range(heads):
            group = heads + h // (heads // groups)
            query = rotate_plainly(projected[t, h], t, config.rope_theta)
            keys = [rotate_plainly(projected[s, group], s, config.rope_theta) for s in range(t + 1)]
            scores = np.exp(log_softmax(np.array([query @ key for key in keys]) / np.sqrt(size)))
            mixed[t, h] = sum(score * projected[s, group + groups] for s, score in enumerate(scores))
    return mixed.reshape(len(normed), -1) @ weights[prefix + "out.weight"].T


def rotate_plainly(head: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Turns the pair (i, i + d/2) by position x theta^(-2i/d), as complex numbers."""
    half = len(head) // 2
    pairs = head[:half] + 1j * head[half:]
    turned = pairs * np.exp(1j * position * theta ** (-2 * np.arange(half) / len(head)))
    return np.concatenate([turned.real, turned.imag])


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def generate_uncached(checkpoint: Checkpoint, prompt: str, num_tokens: int) -> list[int]:
    """Greedy continuation that reads the whole text anew for every token."""
    tokens = [checkpoint.tokenizer.end_id, *checkpoint.tokenizer.encode(prompt).tolist()]
    drawn: list[int] = []
    for _ in range(num_tokens):
        with torch.inference_mode():
            hidden_BTD, _ = checkpoint.decoder(torch.tensor([tokens + drawn]))
            drawn.append(int(checkpoint.decoder.logprobs(hidden_BTD[0, -1]).argmax()))
        if drawn[-1] == checkpoint.tokenizer.end_id:
            return drawn[:-1]
    return drawn


def mix_plainly(
    lm: np.ndarray, distances: list[float], values: list[int], temperature: float, lam: float
) -> np.ndarray:
    """lam p_kNN + (1 - lam) p_LM over the vocabulary, in float64 (arXiv 1911.00172, equations 2 and 3)."""
    memory = np.zeros(len(lm))
    finite = [(d, v) for d, v in zip(distances, values, strict=True) if np.isfinite(d)]
    if not finite:
        return lm
    least = min(d for d, _ in finite)
    for distance, value in finite:
        memory[value] += np.exp(-(distance - least) / temperature)
    return lam * memory / memory.sum() + (1 - lam) * lm


def stop_plainly(text: str, stops: list[str]) -> str:
    """The text before the first place where a stop string begins."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def exact_search(queries_QD: np.ndarray, keys_ND: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Squared L2 distances and rows of the k nearest keys, in float64, both sides rounded to float16 first."""
    queries_QD, keys_ND = (each.astype(np.float16).astype(np.float64) for each in (queries_QD, keys_ND))
    distances_QN = ((queries_QD[:, None] - keys_ND[None]) ** 2).sum(axis=-1)
    order_QK = np.argsort(distances_QN, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(distances_QN, order_QK, axis=1), order_QK


def orthogonal_plainly(matrix: np.ndarray, coefficients: tuple[float, float, float], steps: int) -> np.ndarray:
    """What Newton and Schulz' iteration does, told by singular values: each goes through a polynomial."""
    a, b, c = coefficients
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


def list_by_groups(
    key: np.ndarray, centroids: np.ndarray, groups: list[np.ndarray], middles: list[np.ndarray], looked_at: int
) -> int:
    """The number of the nearest centroid among those of the groups whose middles are nearest."""
    nearest = sorted(range(len(groups)), key=lambda group: ((key - middles[group]) ** 2).sum())[:looked_at]
    lists = [number for group in nearest for number in groups[group].tolist()]
    return min(lists, key=lambda number: ((key - centroids[number]) ** 2).sum())


def moved_centroids(centroids: np.ndarray, points: np.ndarray, lists: list[int] | None = None) -> np.ndarray:
    """A round of Lloyd's: the mean of each list's points, where it has any; a list has the points nearest to it."""
    lists = lists or [int(((centroids - point) ** 2).sum(axis=1).argmin()) for point in points]
    moved = centroids.astype(np.float64)
    for number in set(lists):
        moved[number] = np.mean([point for point, own in zip(points, lists, strict=True) if own == number], axis=0)
    return moved
