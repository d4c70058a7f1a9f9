"""Index quality, measured against exact search on queries from the store's own documents.

A query is a position of a stored document, encoded in its own context. Its neighbors leave that whole document out,
because a query of stored text finds itself. Where hardly anything else is near, as in a store of one long document,
they leave out the position alone. recall@k is the share of the k exact neighbors that were found, and softmax mass the
share of exact p_kNN that they carry. The change in nats per token is the effect on predictions.

Most public reports of a kNN-LM that does not help were of a broken index that nothing checked: keys one place off their
values, or positions that do not find themselves. `check_keys` encodes some documents of the store again, as building
did, and looks for both.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np
from jaxtyping import Bool, Float32, Int64

from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress, silent
from memlm.data.windows import Window, WindowSize, blocks_of
from memlm.index.neighbors import Neighbors, Searcher, search_filtered
from memlm.index.selection import agreement, mean_and_error
from memlm.index.store.snapshot import Snapshot
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.encoder import Encoder, Prediction, document_windows, predictions_of
from memlm.retrieval.result import RetrievalResult
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore

NUM_WINDOWS, WINDOWS_AT_ONCE = 64, 16
QUERIES_PER_WINDOW = 8
NUM_DOCUMENTS, WINDOWS_PER_DOCUMENT = 16, 2
ALIGNED, FOUND, FOUND_BY_CODES = 0.99, 0.95, 0.75
FOUND_WITHOUT_KEYS = 0.2  # by codes alone, which may be rough: sound stores had at least 0.42, broken ones 0.06
SELF_K = 32
OVERFETCH = (2, 8, 32)  # times k, until k are left: the nearest may all be of the query's own document
REL_TOL, ABS_TOL = 1.001, 1e-6


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over `queries` positions, and their standard errors. They compare the index with exact search over its own
    entries. `pruning_nats_change` compares these entries with all, if some are pruned.
    """

    recall: float
    recall_error: float
    softmax_mass: float
    softmax_mass_error: float
    nats_change: float
    nats_change_error: float
    k: int
    queries: int
    pruning_nats_change: float | None = None
    pruning_nats_change_error: float | None = None

    def as_dict(self) -> dict[str, float | int | None]:
        """Returns the fields as the manifest and --json hold them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class KeyCheck:
    """Shares of `positions` that were encoded again. `found`: a search gives their own entry or one as near, or, if
    distances are not `exact`, has it among the nearest few. `aligned`: the key is nearer to that of their own entry
    than to those of the entries before and behind it (None if keys were not kept).
    """

    found: float
    aligned: float | None
    positions: int
    exact: bool

    def problems(self, store: str) -> list[str]:
        """Describes the problems of the store called `store`, each with its remedy."""
        problems = []
        if self.aligned is not None and self.aligned < ALIGNED:
            problems.append(
                f"{store}: of {1 - self.aligned:.0%} of its positions the key is not the one before its value"
            )
        by_codes = FOUND_WITHOUT_KEYS if self.aligned is None else FOUND_BY_CODES
        if self.found < (FOUND if self.exact else by_codes):
            problems.append(f"{store}: {1 - self.found:.0%} of its positions do not find themselves")
        return [f"{problem}; build the store anew, with the model that is to use it" for problem in problems]


@dataclass(frozen=True, slots=True)
class Queries:
    """Positions of stored documents: ids, keys, the tokens that follow, the model's log-probability of these, and the
    documents that are left out (-1: only the position itself).
    """

    ids_Q: Int64[np.ndarray, " Q"]
    keys_QD: Float32[np.ndarray, "Q D"]
    targets_Q: Int64[np.ndarray, " Q"]
    lm_logprobs_Q: Float32[np.ndarray, " Q"]
    documents_Q: Int64[np.ndarray, " Q"]


@dataclass(frozen=True, slots=True)
class Trial:
    """Queries with their exact neighbors, an index' reference. `unpruned` are those among all entries, if some are
    pruned.
    """

    queries: Queries
    exact: Neighbors
    unpruned: Neighbors | None = None


def sample_trial(store: ModelStore, checkpoint: Checkpoint, *, seed: int = 0, progress: Progress = silent) -> Trial:
    """Samples positions of the store's documents and finds their exact neighbors, as many as its default k."""
    snapshot = store.snapshot.keyed
    return trial_of(snapshot, sample_queries(snapshot, checkpoint, seed=seed, progress=progress))


def trial_of(snapshot: Snapshot, queries: Queries) -> Trial:
    """Finds the exact neighbors of some queries, as many as the store's default k."""
    k = snapshot.defaults.k
    exact = leave_one_out(snapshot, snapshot.exact(), queries, k)
    if (exact.ids_QK[:, 0] < 0).any():
        queries = _with_documents(queries, exact)
        exact = leave_one_out(snapshot, snapshot.exact(), queries, k)
    if not snapshot.num_pruned_entries:
        return Trial(queries, exact)
    return Trial(queries, exact, leave_one_out(snapshot, snapshot.exact(pruned=True), queries, k))


def exact_quality(snapshot: Snapshot) -> Quality:
    """Returns the quality of an index that is exact search: nothing has to be measured."""
    return Quality(1.0, 0.0, 1.0, 0.0, 0.0, 0.0, k=snapshot.defaults.k, queries=0)


def measure_quality(store: ModelStore, trial: Trial) -> Quality:
    """Compares the store's index with exact search, with the store's own lam and temperature."""
    retriever = Retriever.of([store], RetrievalParams(k=trial.exact.ids_QK.shape[1]))
    queries, exact = trial.queries, trial.exact
    found = leave_one_out(store.snapshot, store.snapshot, queries, retriever.knn.k)
    recall_Q, mass_Q = agreement(found, exact, retriever.knn.temperature)
    (recall, recall_error), (mass, mass_error) = mean_and_error(recall_Q), mean_and_error(mass_Q)
    change_Q = _nats(queries, found, retriever) - _nats(queries, exact, retriever)
    nats, nats_error = mean_and_error(change_Q)
    pruning = (
        (None, None)
        if trial.unpruned is None
        else mean_and_error(_nats(queries, exact, retriever) - _nats(queries, trial.unpruned, retriever))
    )
    return Quality(
        recall=recall,
        recall_error=recall_error,
        softmax_mass=mass,
        softmax_mass_error=mass_error,
        nats_change=nats,
        nats_change_error=nats_error,
        k=retriever.knn.k,
        queries=len(change_Q),
        pruning_nats_change=pruning[0],
        pruning_nats_change_error=pruning[1],
    )


def check_keys(snapshot: Snapshot, checkpoint: Checkpoint, *, seed: int = 0, progress: Progress = silent) -> KeyCheck:
    """Encodes the beginnings of some documents again and compares the keys with those in the store. If keys were not
    kept, only searches for them. A store without entries passes, and one without keys.
    """
    snapshot = snapshot.keyed
    if not snapshot.segments:
        return KeyCheck(found=1.0, aligned=None, positions=0, exact=False)
    spec, start_id = snapshot.manifest.spec, checkpoint.tokenizer.start_id
    keys, ids = [np.empty((0, snapshot.dim), np.float16)], [np.empty(0, np.int64)]
    documents = snapshot.sample_documents(NUM_DOCUMENTS, seed)
    for number, document in enumerate(documents):
        progress("check keys", number, len(documents))
        tokens_n = snapshot.tokens(document.document_id, 0, WINDOWS_PER_DOCUMENT * spec.context)
        windows = list(document_windows(checkpoint.decoder, tokens_n, start_id, WindowSize(spec.context, spec.stride)))
        keys += Encoder(checkpoint.decoder).keys(windows)
        ids.append(document.first_id + np.arange(len(tokens_n)))
    progress("check keys", len(documents), len(documents))
    return compare_keys(snapshot, np.concatenate(keys, dtype=np.float32), np.concatenate(ids))


def compare_keys(snapshot: Snapshot, keys_ND: Float32[np.ndarray, "N D"], ids_N: Int64[np.ndarray, " N"]) -> KeyCheck:
    """Compares keys that were encoded again with those in the store, of entries `ids_N`."""
    exact = snapshot.distances == "exact"
    if not len(ids_N):
        return KeyCheck(found=1.0, aligned=None, positions=0, exact=exact)
    kept_N = np.isin(ids_N, snapshot.live(ids_N))
    if not snapshot.has_keys:
        found_N = _is_among_nearest(snapshot, keys_ND[kept_N], ids_N[kept_N])
        return KeyCheck(found=float(found_N.mean()), aligned=None, positions=len(ids_N), exact=False)
    own_N, documents_N = _distances(keys_ND, snapshot.keys(ids_N)), snapshot.document_of(ids_N)
    beside_2N = np.full((2, len(ids_N)), np.inf, np.float32)
    for row_N, sides_N in zip(beside_2N, (ids_N - 1, ids_N + 1), strict=True):
        within_N = snapshot.document_of(sides_N) == documents_N
        row_N[within_N] = _distances(keys_ND[within_N], snapshot.keys(sides_N[within_N]))
    if exact:
        nearest_N: np.ndarray = snapshot.search(keys_ND[kept_N], 1).distances_QK[:, 0]
        found_N = nearest_N <= own_N[kept_N] * REL_TOL + ABS_TOL
    else:
        found_N = _is_among_nearest(snapshot, keys_ND[kept_N], ids_N[kept_N])
    return KeyCheck(
        found=float(found_N.mean()),
        aligned=float((own_N <= beside_2N.min(axis=0) + ABS_TOL).mean()),
        positions=len(ids_N),
        exact=exact,
    )


def _is_among_nearest(
    snapshot: Snapshot, keys_ND: Float32[np.ndarray, "N D"], ids_N: Int64[np.ndarray, " N"]
) -> Bool[np.ndarray, " N"]:
    """Returns whether a search for each key has its own entry among the nearest few."""
    same_NK = snapshot.search(keys_ND, SELF_K).ids_QK == ids_N[:, None]
    return same_NK.any(axis=1)


def _distances(one_ND: Float32[np.ndarray, "N D"], other_ND: Float32[np.ndarray, "N D"]) -> Float32[np.ndarray, " N"]:
    """Squared L2 between vectors rounded to float16, as searching computes it."""
    difference_ND = one_ND.astype(np.float16).astype(np.float32) - other_ND
    return np.einsum("nd,nd->n", difference_ND, difference_ND)


def sample_queries(
    snapshot: Snapshot, checkpoint: Checkpoint, *, seed: int = 0, progress: Progress = silent
) -> Queries:
    """Samples a few hundred positions, in short runs at random places, each with all the context that fits."""
    ids = snapshot.sample(NUM_WINDOWS, seed)
    windows = [
        _window_ending_at(snapshot, checkpoint, place.document_id, place.token_offset) for place in snapshot.locate(ids)
    ]
    predictions = list[Prediction]()
    for block in blocks_of(windows, WINDOWS_AT_ONCE):
        progress("measure quality", len(predictions), len(windows))
        predictions += predictions_of(checkpoint.decoder, block)
    progress("measure quality", len(windows), len(windows))
    sizes = [len(window.targets_N) for window in windows]
    return Queries(
        ids_Q=np.concatenate([np.arange(last + 1 - size, last + 1) for last, size in zip(ids, sizes, strict=True)]),
        keys_QD=np.concatenate([prediction.keys_ND for prediction in predictions]),
        targets_Q=np.concatenate([window.targets_N for window in windows]),
        lm_logprobs_Q=np.concatenate([prediction.logprobs_N for prediction in predictions]),
        documents_Q=np.repeat(snapshot.document_of(ids), sizes),
    )


def _window_ending_at(snapshot: Snapshot, checkpoint: Checkpoint, document_id: str, offset: int) -> Window:
    """Returns the window of the positions up to `offset`, with all the left context that fits. A segmented model reads
    the document from its beginning.
    """
    first = 0 if checkpoint.decoder.config.is_segmented else max(0, offset + 1 - snapshot.manifest.spec.context)
    tokens = snapshot.tokens(document_id, first, offset + 1)
    before = snapshot.tokens(document_id, first - 1, first) if first else np.array([checkpoint.tokenizer.start_id])
    return Window(np.concatenate([before, tokens[:-1]]), tokens[-QUERIES_PER_WINDOW:])


def neighbors_elsewhere(snapshot: Snapshot, queries: Queries, k: int) -> Neighbors:
    """Returns the k nearest entries that a search finds in other documents than each query's own. Where there is none,
    as in a store of one document, only the position itself is left out.
    """
    found = leave_one_out(snapshot, snapshot, queries, k)
    if (found.ids_QK[:, 0] >= 0).all():
        return found
    return leave_one_out(snapshot, snapshot, _with_documents(queries, found), k)


def _with_documents(queries: Queries, found: Neighbors) -> Queries:
    """Leaves out the documents of the queries that found anything without them, and only the position of the others."""
    alone_Q = found.ids_QK[:, 0] < 0
    return replace(queries, documents_Q=np.where(alone_Q, -1, queries.documents_Q))


def leave_one_out(snapshot: Snapshot, searcher: Searcher, queries: Queries, k: int) -> Neighbors:
    """Returns the k neighbors without the query itself and the document that it leaves out."""

    def keep(ids_RK: Int64[np.ndarray, "R K"], rows_R: Int64[np.ndarray, " R"]) -> Bool[np.ndarray, "R K"]:
        is_elsewhere_RK: np.ndarray = snapshot.document_of(ids_RK) != queries.documents_Q[rows_R, None]
        return is_elsewhere_RK & (ids_RK != queries.ids_Q[rows_R, None])

    return search_filtered(searcher.search, queries.keys_QD, k, keep, [factor * k for factor in OVERFETCH])


def _nats(queries: Queries, found: Neighbors, retriever: Retriever) -> Float32[np.ndarray, " Q"]:
    weighed = RetrievalResult.of(found, retriever.knn.temperature, retriever.knn.lam)
    return -weighed.mix_targets(queries.lm_logprobs_Q, queries.targets_Q)[1]
