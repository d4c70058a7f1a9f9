"""Texts -> entries of a datastore, a piece a step, so that a worker reads them between the steps of its batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from memlm.api.datastores import NewDocument
from memlm.base.steps import Steps
from memlm.data.windows import Window, WindowSize
from memlm.errors import InvalidInput
from memlm.index.store.manifest import StoreSpec
from memlm.index.store.small_segments import NewEntries
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.encoder import Encoder, document_windows


def entries_of(
    checkpoint: Checkpoint, spec: StoreSpec, documents: Sequence[NewDocument], *, keyed: bool
) -> Steps[list[NewEntries]]:
    """Reads documents as an addition to a datastore of `spec` would, with keys if `keyed`: with its windows, and with
    the marks of pruned entries if it has them. Raises InvalidInput for a document without a token.
    """
    read = list[NewEntries]()
    for document in documents:
        token_ids = yield from checkpoint.tokenizer.encode_steps(document.text)
        if not len(token_ids):
            raise InvalidInput(f"document {document.id!r} has no token; give some text", field="documents.text")
        values_N = np.asarray(token_ids, dtype=np.int64)
        keys_ND, pruned_N = None, None
        if keyed:
            yield None  # from here on it needs the model
            keys_ND, pruned_N = yield from _keys_of(checkpoint, spec, values_N)
        read.append(NewEntries(document.id, keys_ND, values_N, pruned_N, document.title, document.metadata))
    return read


def _keys_of(
    checkpoint: Checkpoint, spec: StoreSpec, values_N: np.ndarray
) -> Steps[tuple[np.ndarray, np.ndarray | None]]:
    """The keys of a document, and which of its entries are pruned."""
    size = WindowSize(spec.context, spec.stride)
    encoder = Encoder(checkpoint.decoder)
    keys, pruned = list[np.ndarray](), list[np.ndarray]()
    for window in document_windows(checkpoint.decoder, values_N, checkpoint.tokenizer.start_id, size):
        if spec.prune is None:
            for part_ND in encoder.key_parts(window):
                keys.append(part_ND)
                yield None
        else:
            yield from _pruned_keys(encoder, window, spec.prune, keys, pruned)
    return np.concatenate(keys), np.concatenate(pruned) if spec.prune is not None else None


def _pruned_keys(
    encoder: Encoder, window: Window, prune: float, keys: list[np.ndarray], pruned: list[np.ndarray]
) -> Steps[None]:
    """Appends the keys of a window, and the marks of those whose token the model gives the probability `prune`."""
    for part in encoder.parts([window]):
        if part is not None:
            keys.append(part[1].keys_ND.astype(np.float16))
            pruned.append(part[1].logprobs_N >= np.float32(math.log(prune)))
        yield None
