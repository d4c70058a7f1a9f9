"""Drafts: how much faster text comes with them, by kind of prompt, with a datastore and without."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from memlm.api.generation import Completion
from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress
from memlm.bench.texts import alternately, median_ratio
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.generation.drafts.budget import DraftBudget
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import load_checkpoint

PROMPT_CHARACTERS, TOKENS = 600, 96
COPIED_CHARACTERS, STARTED_CHARACTERS = 500, 100  # of a text that is to be repeated, and of its begun repetition
KEYS_AT_ONCE = 5
# With the datastore and drafts, with the datastore alone, and the model by itself.
WAYS: dict[str, dict[str, Any]] = {"drafts": {}, "none": {"drafts": 0}, "alone": {"drafts": 0, "use_store": False}}
SAMPLED = {"temperature": 0.8}
# Nothing in a text of such a temperature repeats, so that no draft is right.
RANDOM = {"temperature": 3.0}


def bench_drafts(
    model: Path,
    store: Path,
    held_out: Corpus,
    *,
    prompts: int,
    streams: Sequence[int],
    repeats: int,
    dtype: str,
    progress: Progress,
) -> dict[str, Any]:
    """Each row has a kind of prompt, a number of streams, and ratios of tokens/s: with drafts over without, both with
    the datastore, and with datastore and drafts over the model alone without drafts. `identical` is the share of texts
    that drafts did not change. `tried_from_text_at_2` counts the second tokens of drafts from the text whose first one
    was accepted, and `taken_from_text_at_2` those of them that were accepted too.
    """
    with LanguageModel(load_checkpoint(model, dtype=dtype), [store]) as lm:
        texts = [document.text for document in held_out if len(document.text) > 2 * PROMPT_CHARACTERS][:prompts]
        if len(texts) < max(streams):
            raise InvalidInput(
                f"{len(texts)} texts of over {2 * PROMPT_CHARACTERS} characters as prompts, and {max(streams)} streams;"
                " give as many (--prompts), or fewer streams (--streams)",
                field="prompts",
            )
        middles = [text[len(text) // 2 :] for text in texts]
        continued = [text[:PROMPT_CHARACTERS] for text in middles]
        copied = [f"{text[:COPIED_CHARACTERS]}\n\n{text[:STARTED_CHARACTERS]}" for text in middles]
        kinds: dict[str, tuple[list[str], dict[str, Any]]] = {
            "in domain, greedy": (continued, {"temperature": 0}),
            "in domain, sampled": (continued, SAMPLED),
            "repeated, greedy": (copied, {"temperature": 0}),
            "no match": (continued, RANDOM),
        }
        rows = []
        for number, (name, (asked, options)) in enumerate(kinds.items()):
            for count in streams:
                progress("kinds of prompts", number * len(streams), len(kinds) * len(streams))
                groups = [asked[begin : begin + count] for begin in range(0, len(asked) - count + 1, count)]
                rows.append({"prompts": name, "streams": count, **_compared(lm, groups, options, repeats)})
        return {"rows": rows, "keys_at_once_over_one": _search_ratio(lm, repeats), "model": lm.info.name}


def _compared(
    lm: LanguageModel, groups: Sequence[Sequence[str]], options: dict[str, Any], repeats: int
) -> dict[str, Any]:
    """Speeds of the three ways over groups of prompts that are continued side by side."""
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    identical = steps = tokens = 0
    seen = _places(lm)
    for group in groups:
        completed: dict[str, tuple[Completion, ...]] = {}
        # The first pass over a datastore reads its lists from the disk, whichever way comes first.
        lm.generate_batch(group, max_tokens=TOKENS, seed=1, drafts=0, **options)

        def tokens_per_s(way: str, group: Sequence[str], completed: dict[str, tuple[Completion, ...]]) -> float:
            completed[way] = lm.generate_batch(group, max_tokens=TOKENS, seed=1, **options, **WAYS[way])
            return _tokens_per_s(completed[way])

        runs = alternately(repeats, *(partial(tokens_per_s, way, group, completed) for way in WAYS))
        for way, run in zip(WAYS, runs, strict=True):
            speeds[way].append(statistics.median(run))
        for found, expected in zip(completed["drafts"], completed["none"], strict=True):
            identical += found.text == expected.text
            usage = found.finished.usage
            steps, tokens = steps + usage.steps, tokens + usage.generated_tokens
            for source in usage.drafts:
                counts[source.source][0] += source.drafted
                counts[source.source][1] += source.accepted
    over_none, least, most = median_ratio(speeds["drafts"], speeds["none"])
    return {
        "drafts_over_none": over_none,
        "drafts_over_none_least": least,
        "drafts_over_none_most": most,
        "with_store_and_drafts_over_alone": median_ratio(speeds["drafts"], speeds["alone"])[0],
        "tokens_per_s": statistics.median(speeds["drafts"]),
        "tokens_a_step": tokens / steps,
        "identical": identical / sum(map(len, groups)),
        **{f"drafted_from_{source}": drafted for source, (drafted, _) in sorted(counts.items())},
        **{f"accepted_from_{source}": accepted for source, (_, accepted) in sorted(counts.items())},
        **{name: count - seen[name] for name, count in _places(lm).items() if count > seen[name]},
    }


def _places(lm: LanguageModel) -> Counter[str]:
    """How often the token at each place of a draft was tried, and accepted, by source, in all repeats until now."""
    retriever = lm.engine.stores.retriever(RetrievalParams())
    assert retriever is not None
    survival = DraftBudget.of(lm.checkpoint.decoder).experience(retriever.stores).survival
    return Counter(
        {
            f"{name}_from_{source}_at_{place + 1}": count
            for name, counts in (("tried", survival.tried), ("taken", survival.accepted))
            for (source, place), count in sorted(counts.items())
        }
    )


def _tokens_per_s(completions: Sequence[Completion]) -> float:
    """Tokens after the first one of each, a second."""
    usages = [completion.finished.usage for completion in completions]
    return 1000 * sum(usage.generated_tokens - 1 for usage in usages) / max(usage.decode_ms for usage in usages)


def _search_ratio(lm: LanguageModel, repeats: int) -> float:
    """The time of a search of several keys over that of a search of one."""
    retriever = lm.engine.stores.retriever(RetrievalParams())
    assert retriever is not None
    snapshot = retriever.stores[0].snapshot
    keys_ND = snapshot.keys(snapshot.sample(KEYS_AT_ONCE * 50, 1))

    def seconds(size: int) -> float:
        begin = time.perf_counter()
        for first in range(0, len(keys_ND) - size + 1, KEYS_AT_ONCE):
            retriever.search(keys_ND[first : first + size])
        return time.perf_counter() - begin

    many, one = alternately(repeats, lambda: seconds(KEYS_AT_ONCE), lambda: seconds(1))
    return float(np.median(many) / np.median(one))
