"""Held-out texts -> the scores of a model with and without its datastore, for each text and for all together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memlm.api.params import RetrievalParams
from memlm.api.scoring import Score
from memlm.base.progress import Progress, silent
from memlm.base.steps import run_steps
from memlm.data.corpus import Texts, corpus_of
from memlm.errors import check_kind
from memlm.generation.scoring import ScoreAccumulator, score_windows
from memlm.language_model import LanguageModel
from memlm.retrieval.encoder import text_windows


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The score of each text by its document id, and of all together."""

    texts: dict[str, Score]
    total: Score


def evaluate(lm: LanguageModel, texts: Texts, *, progress: Progress = silent, **retrieval: Any) -> Evaluation:
    """Scores every text of a corpus, or of paths or documents, one at a time. `retrieval` are the fields of
    `RetrievalParams`.
    """
    check_kind("lm", lm, LanguageModel, "a model as memlm.load returns it, and then the texts")
    texts = corpus_of(texts)
    params = RetrievalParams.of(**retrieval)
    retriever = lm.engine.stores.retriever(params)
    size = retriever.window_size if retriever else None
    scores: dict[str, Score] = {}
    total, num_bytes = ScoreAccumulator(), texts.num_bytes
    for document in texts:
        accumulator = ScoreAccumulator()
        windows, past = text_windows(lm.checkpoint, document.text, size), lm.engine.own_past(params)
        for scored in score_windows(lm.checkpoint, windows, retriever, past):
            accumulator.add(scored)
            total.add(scored)
        for each in (accumulator, total):
            run_steps(each.add_text(document.text))
        scores[document.id] = accumulator.score(retriever)
        progress("evaluate", total.num_bytes, max(num_bytes, total.num_bytes), f"{total.tokens:,} tokens")
    return Evaluation(scores, total.score(retriever))
