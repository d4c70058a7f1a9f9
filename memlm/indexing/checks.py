"""What is checked of a store after it was written: that keys belong to their values, and that the index finds them.

"full" encodes some documents again, and compares an index with exact search on a few hundred positions. "quick" does
both on fewer positions: a tenth of those that were written, or about a thousand of few, and fewer of a large model. So
results depend on the documents and the model, and not on the machine's load. Time ends it only after four times as long
as it should take, and the report says so. "none" does nothing. An exact index is not compared with exact search, which
it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from memlm.base.progress import Progress
from memlm.index.factory import FLAT
from memlm.index.store.datastore import Datastore
from memlm.index.store.snapshot import Snapshot
from memlm.indexing.passages import (
    MAX_PROMPTS,
    MAX_TOKENS,
    NO_LIMIT,
    Passages,
    TimeLimit,
    sample_passages,
    sample_prompts,
)
from memlm.indexing.quality import (
    KeyCheck,
    Quality,
    check_keys,
    compare_keys,
    exact_quality,
    measure_quality,
    sample_trial,
    trial_of,
)
from memlm.indexing.self_tuning import SelfTuning, must_tune, tune_on_itself
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.store import ModelStore

QUICK_SHARE, QUICK_TOKENS, QUICK_PROMPTS = 0.1, 1024, 12
QUICK_PARAMETERS, LEAST_TOKENS, LEAST_PROMPTS = 135_000_000, 256, 4  # a larger model reads fewer positions, to a limit
QUICK_S, PATIENCE = 5.0, 4  # for these positions on two slow cores, and how many times as long they may take
QUICK_QUERIES = 512
SEARCHED_PAIRS = 200_000_000  # positions times entries that quick checks compare, about a second's work
READ_BYTES_PER_S = 1e9
PRODUCTS_PER_S = 1e10


@dataclass(frozen=True, slots=True)
class Checked:
    """The results of a store's checks. Each is None if it was not done. `was_cut` if time ended them early. `untuned`
    is the reason if the store was never tuned. `outgrown` says how far it has outgrown its tuning, if it has.
    """

    keys: KeyCheck | None = None
    quality: Quality | None = None
    tuning: SelfTuning | None = None
    was_cut: bool = False
    untuned: str | None = None
    outgrown: str | None = None


def run_checks(
    datastore: Datastore,
    checkpoint: Checkpoint,
    *,
    check: str,
    worked_s: float,
    newest: bool = False,
    with_keys: bool = True,
    progress: Progress,
) -> Checked:
    """Checks a store, or its `newest` segment, after work of `worked_s` seconds, and commits the quality of its index.
    Tunes on its own documents a store that was never tuned, or has outgrown that. Of a store without keys there is
    nothing to check.
    """
    if not datastore.snapshot.is_keyed:
        return Checked()
    if check == "none" or not datastore.snapshot.keyed.num_entries:
        return Checked(untuned=_why_untuned(datastore, check), outgrown=datastore.snapshot.outgrown)
    store, seed = ModelStore(datastore, checkpoint), datastore.manifest.spec.seed
    tunes = must_tune(datastore.snapshot)
    should_take_s = max(QUICK_SHARE * worked_s, QUICK_S)
    limit = NO_LIMIT if check == "full" else TimeLimit.starting_now(PATIENCE * should_take_s)
    passages, keys, tuning = None, None, None
    keyed = datastore.snapshot.keyed
    most = _most_positions(keyed, checkpoint, check, newest=newest)
    sample = partial(sample_passages, keyed, checkpoint, limit=limit, seed=seed, progress=progress)
    if check == "quick" or (tunes and not newest):
        passages = sample(newest=newest, max_tokens=most)
    if with_keys and check == "full":
        keys = check_keys(keyed, checkpoint, seed=seed, progress=progress)
    elif with_keys and passages is not None:
        keys = compare_keys(keyed, passages.keys_QD, passages.ids_Q)
    if tunes:
        of_all = passages
        if of_all is None or newest:  # the others are of the addition alone
            few = MAX_TOKENS if check == "full" else _of_a_large_model(checkpoint, QUICK_TOKENS, LEAST_TOKENS)
            of_all = sample(max_tokens=min(most, few))
        num_prompts = MAX_PROMPTS if check == "full" else _of_a_large_model(checkpoint, QUICK_PROMPTS, LEAST_PROMPTS)
        prompts = sample_prompts(keyed, checkpoint, most=num_prompts, limit=limit, seed=seed, progress=progress)
        tuning = tune_on_itself(store, of_all, prompts)
    quality = _measure(store, checkpoint, passages, limit, should_take_s, progress)
    untuned = _why_untuned(datastore, check, was_cut=limit.was_reached)
    return Checked(keys, quality, tuning, limit.was_reached, untuned, datastore.snapshot.outgrown)


def _why_untuned(datastore: Datastore, check: str, *, was_cut: bool = False) -> str | None:
    if datastore.snapshot.defaults.tuned_on is not None:
        return None
    if check == "none":
        return "nothing was checked"
    return "its checks were cut" if was_cut else "its documents are too few or too short"


def _most_positions(snapshot: Snapshot, checkpoint: Checkpoint, check: str, *, newest: bool) -> int:
    """Returns how many positions are worth encoding. Exact search compares each with all entries."""
    most = MAX_TOKENS
    if check == "quick":
        written = snapshot.newest.record.entries if newest else snapshot.num_entries
        few = _of_a_large_model(checkpoint, QUICK_TOKENS, LEAST_TOKENS)
        most = min(most, max(few, round(QUICK_SHARE * written)))
    if not snapshot.nlist:
        most = min(most, max(QUICK_QUERIES, SEARCHED_PAIRS // snapshot.num_entries))
    return most


def _of_a_large_model(checkpoint: Checkpoint, number: int, least: int) -> int:
    """Returns fewer of a model with more parameters, which takes longer for each, but at least `least`."""
    parameters = sum(each.numel() for each in checkpoint.decoder.parameters())
    return max(least, min(number, number * QUICK_PARAMETERS // parameters))


def _measure(
    store: ModelStore,
    checkpoint: Checkpoint,
    passages: Passages | None,
    limit: TimeLimit,
    should_take_s: float,
    progress: Progress,
) -> Quality | None:
    """Compares the index with exact search and commits the result. Does nothing for a store without all its keys, or if
    the comparison would exceed the limit.
    """
    snapshot = store.snapshot.keyed
    if not snapshot.has_keys:
        return None
    if snapshot.index_kind == FLAT and not snapshot.num_pruned_entries:
        quality = exact_quality(snapshot)
    elif limit is NO_LIMIT:
        quality = measure_quality(
            store, sample_trial(store, checkpoint, seed=snapshot.manifest.spec.seed, progress=progress)
        )
    elif passages is not None and _seconds_of_exact_search(snapshot, len(passages.ids_Q)) <= should_take_s:
        quality = measure_quality(store, trial_of(snapshot, passages.queries(snapshot, QUICK_QUERIES)))
    else:
        return None
    store.datastore.save_quality(quality.as_dict())
    return quality


def _seconds_of_exact_search(snapshot: Snapshot, num_queries: int) -> float:
    """Estimates two passes over all keys."""
    numbers = snapshot.num_entries * snapshot.dim
    return 2 * numbers * (2 / READ_BYTES_PER_S + min(QUICK_QUERIES, num_queries) / PRODUCTS_PER_S)
