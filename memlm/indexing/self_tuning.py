"""Defaults of a new store, from its own documents: k, temperature, a fixed λ, and a λ that adapts.

New text of its domain is measured by positions of its documents, each searched for without its whole document. A store
of one document has no other: each half stands for new text beside the other. Text that the store holds is measured by
pieces that are read again without the text before them, as a prompt is.

A store that has several times as many entries as then is tuned again, unless it was tuned by hand.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Int64

from memlm.index.neighbors import Neighbors
from memlm.index.store.manifest import OWN_DOCUMENTS, KnnDefaults
from memlm.index.store.snapshot import Snapshot
from memlm.indexing.fitting import Trial, fit_lam, gain_of, grid_search, sharpened
from memlm.indexing.passages import Passages
from memlm.indexing.quality import neighbors_elsewhere
from memlm.retrieval.store import ModelStore

LARGEST_K = 64
LEAST_POSITIONS = 64  # below which nothing can be fitted
BLOCKS = 8  # of the only passage of a store
SPARE = 32  # times k entries are searched for, of which half may be in the wrong half of a document


@dataclass(frozen=True, slots=True)
class SelfTuning:
    """The chosen defaults, and the gain in nats per token over the model alone, with its standard error: on `tokens`
    positions of the store's documents, each without its own document, with the λ that was kept, before its weights were
    sharpened (`fitting.sharpened`). `own_gain` is the gain on text that the store holds.
    """

    k: int
    lam: float
    temperature: float
    is_adaptive: bool
    tokens: int
    gain: float
    gain_error: float
    own_gain: float


def must_tune(snapshot: Snapshot) -> bool:
    """Whether a store should be tuned on its own documents: it never was, or it has outgrown that. Earlier versions did
    not count the entries, so that their tunings are done once more.
    """
    defaults = snapshot.defaults
    if defaults.tuned_on is None:
        return True
    return defaults.tuned_itself and (defaults.tuned_entries is None or snapshot.outgrown is not None)


def tune_on_itself(store: ModelStore, new: Passages, own: Passages) -> SelfTuning | None:
    """Tunes a store on passages of its documents and saves the result as its defaults. `new` are searched for without
    their documents, `own` with them. Returns None, without a change, for too few positions.
    """
    snapshot, before = store.snapshot.keyed, store.snapshot.defaults
    if min(len(new.ids_Q), len(own.ids_Q)) < LEAST_POSITIONS:
        return None
    k = min(LARGEST_K, snapshot.num_entries)
    found, windows_Q = _neighbors_of_new_text(snapshot, new, k)
    new_text, own_text = new.evidence(found, windows_Q), own.evidence(snapshot.search(own.keys_QD, k))
    k, temperature, lam = grid_search(new_text, _scale(found) or before.temperature, own_text)
    new_trial, own_trial = (Trial.of(each, k, temperature) for each in (new_text, own_text))
    fitted = fit_lam(new_trial, own_trial, lam)
    adaptive, keeps = sharpened(fitted.adaptive, new_text, k, temperature), fitted.kept
    mixed_Q = fitted.mixed_Q if keeps else new_trial.mixed(lam)
    gain, gain_error = gain_of(mixed_Q, new_trial.lm_Q, new_trial.windows_Q)
    own_trial = Trial.of(own_text, k, temperature, adaptive if keeps else None)
    own_gain, _ = gain_of(own_trial.mixed(adaptive if keeps else lam), own_trial.lm_Q, own_trial.windows_Q)
    result = SelfTuning(k, lam, temperature, keeps, len(new.ids_Q), gain, gain_error, own_gain)
    store.datastore.save_defaults(
        KnnDefaults(
            k=k,
            lam=lam,
            temperature=temperature,
            tuned_on=f"{OWN_DOCUMENTS} ({len(new.ids_Q)} tokens)",
            gain=gain,
            gain_error=gain_error,
            adaptive=asdict(adaptive) if keeps else None,
            nprobe=before.nprobe,
            tuned_entries=snapshot.num_entries,
        )
    )
    return result


def _neighbors_of_new_text(
    snapshot: Snapshot, new: Passages, k: int
) -> tuple[Neighbors, Int64[np.ndarray, " Q"] | None]:
    """Returns the neighbors of each position in other documents, or in the other half of the only document. If one
    passage is all there is, returns the numbers of blocks of it, to fit λ to some and evaluate it on others.
    """
    if snapshot.num_documents > 1:
        return neighbors_elsewhere(snapshot, new.queries(snapshot), k), None
    (span,) = snapshot.sample_documents(1, 0)
    middle = span.first_id + span.num_entries // 2
    late_Q = new.ids_Q >= middle
    found = snapshot.search(new.keys_QD, min(SPARE * k, snapshot.num_entries))
    is_other_QK = (found.ids_QK >= 0) & ((found.ids_QK >= middle) != late_Q[:, None])
    return found.keep(is_other_QK).first(k), None if new.passages_Q.any() else np.arange(len(late_Q)) * BLOCKS // len(
        late_Q
    )


def _scale(found: Neighbors) -> float | None:
    """Returns half the median distance to the nearest neighbor, or None if nothing was found."""
    nearest_Q = found.distances_QK[:, 0]
    nearest_Q = nearest_Q[np.isfinite(nearest_Q) & (nearest_Q > 0)]
    return float(np.median(nearest_Q)) / 2 if len(nearest_Q) else None
