"""Evidence: a deleted document, compared with a datastore that never held it.

For each kind of index, three states give the probabilities of the documents' tokens: held, deleted and purged. Their
twin is a datastore that was built without the documents. The files are searched for traces of the documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from benchmarks.evidence.domains import Prepared, logprobs_of, read_document, windows_for
from benchmarks.evidence.texts import Domain
from benchmarks.evidence.traces import KINDS as TRACE_KINDS
from benchmarks.evidence.traces import Trace, derive, found_in, traces_of
from benchmarks.per_token import per_token
from memlm.api.datastores import NewDocument
from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress
from memlm.data.corpus import Corpus, Document
from memlm.index.store.datastore import Datastore
from memlm.indexing.build import build_index, compact_index
from memlm.indexing.option_trials import EncodedText
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore

LISTS = 16
KINDS = ("Flat", "IVF,Flat", "IVF_HNSW8,Flat", "IVF,SQfp16", "IVF,SQ8", "IVF,PQ", "IVF,RaBitQ")
REMEMBERED = "remembered"  # the documents came by `remember`, into a small segment of their own
KEPT_TOKENS = 4000  # of the documents that stay, about
K, LAM = 16, 0.25  # equal in all states, since each build finds its own


class State(NamedTuple):
    """The log-probabilities of each document's tokens, and the places of the traces that the files contain."""

    logprobs: list[Float32[np.ndarray, " N"]]
    traces: set[int]


def deletion(checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[dict[str, Any]]:
    """A row for each kind of index. `off_deleted` and `off_purged` are the largest differences of a probability from
    the datastore that never held the documents, with as many lists searched as the build chose, and `off_deleted_exact`
    with all of them. The rows of `deletion-traces` have, for each kind of trace, how many there are, how many are found
    in the files in each state, and how many are `too_short` to be told apart from other bytes, which are left out.
    """
    kept, gone = parts_of(checkpoint, prepared.domain)
    with Datastore.open(prepared.store) as datastore:
        temperature = datastore.snapshot.defaults.temperature
    reads = [read_document(checkpoint, document, windows_for(checkpoint)) for document in gone]
    kinds, rows, found = (*KINDS, REMEMBERED), list[dict[str, Any]](), list[dict[str, Any]]()
    for number, kind in enumerate(kinds):
        with TemporaryDirectory(prefix="memlm-bench-") as folder:
            row, traces = _row(checkpoint, kept, gone, reads, kind, temperature, Path(folder))
        words = {"text": prepared.domain.name, "index": kind.replace(",", " ")}
        rows.append({**words, **row})
        found += [{"table": "deletion-traces", **words, **each} for each in traces]
        progress("delete", number + 1, len(kinds), kind)
    return rows + found


def parts_of(checkpoint: Checkpoint, domain: Domain) -> tuple[list[Document], list[Document]]:
    """Documents that stay, which are beginnings of the stored ones, and documents that are deleted, which are all
    held-out ones, each with a title and metadata of its own.
    """
    tokenizer, most = checkpoint.tokenizer, max(1, KEPT_TOKENS // len(domain.stored))
    kept = [
        replace(document, id=f"kept-{document.id}", text=text)
        for document in domain.stored
        if (text := tokenizer.decode(tokenizer.encode(document.text)[:most].tolist()).strip("\ufffd")).strip()
    ]
    gone = [
        replace(
            document,
            id=f"gone-{number:06}-{document.id}",
            title=f"Title {number:06}",
            metadata={"shelf": f"row {number:06}"},
        )
        for number, document in enumerate(domain.held_out)
    ]
    return kept, gone


def _row(
    checkpoint: Checkpoint,
    kept: list[Document],
    gone: list[Document],
    reads: list[EncodedText],
    kind: str,
    temperature: float,
    folder: Path,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    index = factory_of(kind, checkpoint.decoder.config.dim)
    size, held, never = windows_for(checkpoint), folder / "held", folder / "never"
    first = kept if kind == REMEMBERED else [*kept, *gone]  # deleted ones last: the others keep their places
    for documents, path in ((first, held), (kept, never)):
        build_index(
            checkpoint,
            Corpus(documents),
            path,
            index=index,
            window=size.window,
            stride=size.stride,
            check="none",
            keys="now",
        )
    if kind == REMEMBERED:
        with LanguageModel(checkpoint, [held]) as lm:
            lm.remember([NewDocument(each.id, each.text, each.title, each.metadata) for each in gone])
    params = RetrievalParams(k=K, lam=LAM, knn_temperature=temperature)
    every_list = replace(params, nprobe=LISTS)
    traces, too_short = traces_of(checkpoint, gone, held, never)
    states = {"held": _state(checkpoint, held, reads, params, traces)}
    with Datastore.open(held) as datastore:
        datastore.delete([document.id for document in gone])
    states["deleted"] = _state(checkpoint, held, reads, params, traces)
    exact = [_state(checkpoint, path, reads, every_list, ()).logprobs for path in (held, never)]
    compact_index(held, purge=True)
    states["purged"] = _state(checkpoint, held, reads, params, traces)
    states["never"] = _state(checkpoint, never, reads, params, traces)
    row: dict[str, Any] = {"documents": len(gone), "traces": len(traces), "off_deleted_exact": _off(*exact)}
    by_kind: list[dict[str, Any]] = [
        {"cut": kind, "traces": sum(trace.kind == kind for trace in traces), "too_short": too_short[kind]}
        for kind in TRACE_KINDS
    ]
    sizes_D = np.array([len(read.targets_N) for read in reads])
    for name, state in states.items():
        nats_D = -np.array([each.sum(dtype=np.float64) for each in state.logprobs])
        row[f"nats_{name}"], row[f"nats_{name}_error"] = per_token(nats_D, sizes_D)
        row[f"traces_{name}"] = len(state.traces)
        row[f"off_{name}"] = _off(state.logprobs, states["never"].logprobs)
        for each in by_kind:
            each[f"traces_{name}"] = sum(traces[place].kind == each["cut"] for place in state.traces)
    return row, by_kind


def factory_of(kind: str, dim: int) -> str:
    """The factory string of a kind, for keys of a width."""
    if kind == REMEMBERED:
        return "Flat"
    return kind.replace("IVF", f"IVF{LISTS}").replace("PQ", f"PQ{dim // 4}x4")


def _state(
    checkpoint: Checkpoint, store: Path, reads: Sequence[EncodedText], params: RetrievalParams, traces: Sequence[Trace]
) -> State:
    """The state of a store. Its files are searched as they are, and again when those made on demand are there."""
    found = found_in(store, traces)
    derive(checkpoint, store)
    with Datastore.open(store) as datastore:
        retriever = Retriever.of([ModelStore(datastore, checkpoint)], params)
        logprobs = [logprobs_of(read, retriever.search(read.keys_ND, read.max_logprobs_N)) for read in reads]
    return State(logprobs, found | found_in(store, traces))


def _off(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """The largest difference of two probabilities of a token."""
    return max(float(np.abs(np.exp(a) - np.exp(b)).max()) for a, b in zip(one, other, strict=True))
