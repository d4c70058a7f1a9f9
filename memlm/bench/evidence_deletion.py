"""Table of `memlm bench evidence`: a deleted document, compared with a datastore that never held it.

For each kind of index, three states give the probabilities of the documents' tokens: held, deleted and purged. Their
twin is a datastore that was built without the documents. The files are searched for the ids, tokens and keys of the
documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from memlm.api.datastores import NewDocument
from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress
from memlm.bench.evidence_domains import Prepared, logprobs_of, read_document, windows_for
from memlm.bench.past import per_token
from memlm.data.corpus import Corpus, Document
from memlm.errors import InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.indexing.build import build_index, compact_index
from memlm.indexing.option_trials import EncodedText
from memlm.language_model import LanguageModel
from memlm.model.checkpoint import Checkpoint
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore

LISTS = 16
KINDS = ("Flat", "IVF,Flat", "IVF_HNSW8,Flat", "IVF,SQfp16", "IVF,SQ8", "IVF,PQ", "IVF,RaBitQ")
REMEMBERED = "remembered"  # the documents came by `remember`, into a small segment of their own
KEPT_TOKENS, DELETED, DELETED_TOKENS = 3000, 8, 128
K, LAM = 16, 0.25  # equal in all states, since each build finds its own
RUN, STEP = 8, 8  # tokens of a run that is searched for in the files, and the distance between two


class State(NamedTuple):
    """The log-probabilities of each document's tokens, and how many traces of the documents the files contain."""

    logprobs: list[Float32[np.ndarray, " N"]]
    traces: int


def deletion(checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[dict[str, Any]]:
    """A row for each kind of index. `off_deleted` and `off_purged` are the largest differences of a probability from
    the datastore that never held the documents, with as many lists searched as the build chose, and `off_deleted_exact`
    with all of them.
    """
    kept, gone = parts_of(checkpoint, prepared.domain.stored)
    with Datastore.open(prepared.store) as datastore:
        temperature = datastore.snapshot.defaults.temperature
    reads = [read_document(checkpoint, document, windows_for(checkpoint)) for document in gone]
    rows, kinds = [], (*KINDS, REMEMBERED)
    for number, kind in enumerate(kinds):
        with TemporaryDirectory(prefix="memlm-bench-") as folder:
            row = _row(checkpoint, kept, gone, reads, kind, temperature, Path(folder))
        rows.append({"text": prepared.domain.name, "index": kind.replace(",", " "), **row})
        progress("delete", number + 1, len(kinds), kind)
    return rows


def parts_of(checkpoint: Checkpoint, stored: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Pieces of a domain's documents: those that stay, and those that are deleted. Raises InvalidInput for too few."""
    tokenizer, pieces = checkpoint.tokenizer, list[Document]()
    for document in stored:
        ids = tokenizer.encode(document.text).tolist()
        for begin in range(0, len(ids) - DELETED_TOKENS, DELETED_TOKENS):
            text = tokenizer.decode(ids[begin : begin + DELETED_TOKENS]).strip("\ufffd")
            if text.strip():
                pieces.append(replace(document, id=f"piece-{begin}-of-{document.id}", text=text))
    if len(pieces) < 2 * DELETED:
        raise InvalidInput(
            f"the datastore's documents have {len(pieces)} pieces of {DELETED_TOKENS} tokens; expected {2 * DELETED} or"
            " more, so give more entries",
            field="entries",
        )
    pieces = pieces[:: max(1, len(pieces) // (KEPT_TOKENS // DELETED_TOKENS + DELETED))]
    return pieces[DELETED:], pieces[:DELETED]


def _row(
    checkpoint: Checkpoint,
    kept: list[Document],
    gone: list[Document],
    reads: list[EncodedText],
    kind: str,
    temperature: float,
    folder: Path,
) -> dict[str, Any]:
    index = factory_of(kind, checkpoint.decoder.config.dim)
    size, held, never = windows_for(checkpoint), folder / "held", folder / "never"
    first = kept if kind == REMEMBERED else [*kept, *gone]  # deleted ones last: the others keep their places
    for documents, path in ((first, held), (kept, never)):
        build_index(
            checkpoint, Corpus(documents), path, index=index, window=size.window, stride=size.stride, check="none"
        )
    if kind == REMEMBERED:
        with LanguageModel(checkpoint, [held]) as lm:
            lm.remember([NewDocument(each.id, each.text) for each in gone])
    params = RetrievalParams(k=K, lam=LAM, knn_temperature=temperature)
    every_list = replace(params, nprobe=LISTS)
    traces = traces_of(gone, held, never)
    states = {"held": _state(checkpoint, held, reads, params, traces)}
    with Datastore.open(held) as datastore:
        datastore.delete([document.id for document in gone])
    states["deleted"] = _state(checkpoint, held, reads, params, traces)
    exact = [_state(checkpoint, path, reads, every_list, ()).logprobs for path in (held, never)]
    compact_index(held, purge=True)
    states["purged"] = _state(checkpoint, held, reads, params, traces)
    states["never"] = _state(checkpoint, never, reads, params, traces)
    row: dict[str, Any] = {"documents": len(gone), "traces": len(traces), "off_deleted_exact": _off(*exact)}
    sizes_D = np.array([len(read.targets_N) for read in reads])
    for name, state in states.items():
        nats_D = -np.array([each.sum(dtype=np.float64) for each in state.logprobs])
        row[f"nats_{name}"], row[f"nats_{name}_error"] = per_token(nats_D, sizes_D)
        row[f"traces_{name}"] = state.traces
        row[f"off_{name}"] = _off(state.logprobs, states["never"].logprobs)
    return row


def factory_of(kind: str, dim: int) -> str:
    """The factory string of a kind, for keys of a width."""
    if kind == REMEMBERED:
        return "Flat"
    return kind.replace("IVF", f"IVF{LISTS}").replace("PQ", f"PQ{dim // 4}x4")


def _state(
    checkpoint: Checkpoint, store: Path, reads: Sequence[EncodedText], params: RetrievalParams, traces: Sequence[bytes]
) -> State:
    with Datastore.open(store) as datastore:
        retriever = Retriever.of([ModelStore(datastore, checkpoint)], params)
        logprobs = [logprobs_of(read, retriever.search(read.keys_ND, read.max_logprobs_N)) for read in reads]
    return State(logprobs, num_found(store, traces))


def traces_of(gone: Sequence[Document], held: Path, never: Path) -> list[bytes]:
    """Bytes of some documents in a datastore that holds them, without those in one that never did: ids, runs of token
    ids, and keys. Runs and keys begin at every eighth place.
    """
    traces = list[bytes]()
    with Datastore.open(held) as datastore:
        for document in gone:
            traces.append(document.id.encode())
            ((segment, row),) = datastore.snapshot.find_each([document.id])
            keys_ND, ids_N, _ = segment.entries_of(row)
            assert keys_ND is not None  # every kind keeps them
            tokens_N = ids_N.astype("<u4")
            traces += [tokens_N[begin : begin + RUN].tobytes() for begin in range(0, len(ids_N) - RUN + 1, STEP)]
            traces += [key_D.tobytes() for key_D in keys_ND[::STEP]]
    files = _files(never)
    return [trace for trace in traces if not any(trace in file for file in files)]


def num_found(store: Path, traces: Sequence[bytes]) -> int:
    """How many of the traces any file of a datastore contains."""
    files = _files(store)
    return sum(any(trace in file for file in files) for trace in traces)


def _files(store: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()]


def _off(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """The largest difference of two probabilities of a token."""
    return max(float(np.abs(np.exp(a) - np.exp(b)).max()) for a, b in zip(one, other, strict=True))
