"""Held-out documents -> nats per token, during training and on any device.

A model with memory reads each document with an empty memory. Others read overlapping windows, as
`memlm.retrieval.encoder` does. Documents of similar length form a batch, padded at their ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int, Int64
from torch import Tensor

from memlm.base.progress import Progress, silent
from memlm.data.corpus import Document
from memlm.data.tokenizer import Tokenizer
from memlm.model import Decoder
from memlm.retrieval.encoder import document_windows
from memlm.training.distributed import ProcessGroup

PADDING = -100  # a target that is none
BATCH_TOKENS = 8192
MOST_PADDING = 1.25
Row = tuple[Int64[np.ndarray, " T"], Int64[np.ndarray, " N"]]  # inputs, and the targets of the last N of them


class HeldOut:
    """Held-out documents, tokenized once."""

    def __init__(self, documents: Iterable[Document], tokenizer: Tokenizer) -> None:
        self._start_id = tokenizer.start_id
        self._documents = [tokenizer.encode(document.text) for document in documents]

    def loss(self, decoder: Decoder, group: ProcessGroup | None = None, progress: Progress = silent) -> float:
        """Returns nats per token. Each process reads its share, and all return the mean."""
        group = group or ProcessGroup()
        nats, count, total = 0.0, 0, sum(map(len, self._documents[group.rank :: group.size]))
        with torch.no_grad():
            for rows in _batched(self._rows(decoder, group), decoder.config.context_length):
                nats += _sum_nats(decoder, *_padded(rows))
                count += sum(len(targets_N) for _, targets_N in rows)
                progress("score held-out text", count, total)
        return group.mean(nats) / max(group.mean(count), 1e-9)

    def _rows(self, decoder: Decoder, group: ProcessGroup) -> Iterator[Row]:
        for tokens_N in self._documents[group.rank :: group.size]:
            if decoder.config.is_segmented and len(tokens_N):
                yield np.concatenate([[self._start_id], tokens_N[:-1]]), tokens_N
            elif len(tokens_N):
                for window in document_windows(decoder, tokens_N, self._start_id):
                    yield window.inputs_T, window.targets_N


def _batched(rows: Iterable[Row], context_length: int) -> Iterator[list[Row]]:
    """Yields batches of rows, longest first, none padded to much more than its length."""
    ordered, size = sorted(rows, key=lambda row: -len(row[0])), max(1, BATCH_TOKENS // context_length)
    while ordered:
        longest = len(ordered[0][0])
        similar = [row for row in ordered[:size] if len(row[0]) * MOST_PADDING >= longest]
        yield similar
        ordered = ordered[len(similar) :]


def _padded(rows: list[Row]) -> tuple[Int64[Tensor, "B T"], Int64[Tensor, "B T"]]:
    """Returns inputs and targets of equal length."""
    longest = max(len(inputs_T) for inputs_T, _ in rows)
    inputs_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    targets_BT = torch.full_like(inputs_BT, PADDING)
    for row, (inputs_T, targets_N) in enumerate(rows):
        end = len(inputs_T)
        inputs_BT[row, :end] = torch.from_numpy(inputs_T)
        targets_BT[row, end - len(targets_N) : end] = torch.from_numpy(targets_N)
    return inputs_BT, targets_BT


def _sum_nats(decoder: Decoder, inputs_BT: Int[Tensor, "B T"], targets_BT: Int[Tensor, "B T"]) -> float:
    """Returns the nats of all targets, reading a segment at a time."""
    state = decoder.new_state(batch_size=len(inputs_BT)) if decoder.config.is_segmented else None
    nats, length = 0.0, decoder.config.context_length
    for inputs_BS, targets_BS in zip(inputs_BT.split(length, 1), targets_BT.split(length, 1), strict=True):
        hidden_BSD, _ = decoder(inputs_BS.to(decoder.device), state)
        logits_NV = decoder.logits(hidden_BSD).float().flatten(0, 1)
        targets_N = targets_BS.flatten().to(decoder.device)
        nats += float(F.cross_entropy(logits_NV, targets_N, ignore_index=PADDING, reduction="sum"))
    return nats
