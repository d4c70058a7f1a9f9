"""How many keys the queries of a layer read: all, those of a window, or those of HyperAttention (arXiv 2310.05869)."""

from __future__ import annotations

from memlm.bench.effect import Figures, accuracy
from memlm.bench.learning import Learned
from memlm.model import ModelConfig
from memlm.zoo.hyper import Hyper


def accuracy_and_keys(learned: Learned) -> Figures:
    """Returns `accuracy`, and `keys_read`: the share of the products of queries and keys in the last layer."""
    tokens = learned.task.num_tokens
    read = sum(keys_read(position, learned.decoder.config) for position in range(tokens))
    return {**accuracy(learned), "keys_read": read / (tokens * (tokens + 1) / 2)}


def keys_read(position: int, config: ModelConfig) -> int:
    """Returns how many keys a query of the last layer reads up to its position.

    `hyper` reads its own block so far, and of each run of earlier blocks, one for each binary digit of their number,
    the likely keys and the samples.
    """
    last, part = config.num_layers - 1, config.layer_at(config.num_layers - 1).mixer
    if isinstance(part, Hyper):
        blocks, own = divmod(position, part.block)
        runs = [part.block << level for level in range(blocks.bit_length()) if blocks >> level & 1]
        return own + 1 + sum(part.block + min(part.samples, run - part.block) for run in runs)
    window = config.windows[last] if config.windows else 0
    return min(position + 1, window or position + 1)
