"""What was asked before counts with a share in each part of the score of a passage: words, meaning, threshold."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from encoders import save_bert

from memlm.api.answers import FindPassagesRequest
from memlm.api.passages import Passage
from memlm.base.steps import run_steps
from memlm.index.store.derived import cuts
from memlm.index.store.manifest import PASSAGES, VECTORS
from memlm.indexing.vectors import make_vectors
from memlm.language_model import LanguageModel, load
from memlm.model.files.encoder_files import load_encoder
from memlm.retrieval.passage_search import EARLIER, MANY_WORDS_BEHIND, NEARLY_CLOSE

QUESTION, BEFORE = "the memory of the model", "which page, and a stream?"  # which share no word


@pytest.fixture
def lm(
    model_folder: Path, store_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LanguageModel]:
    """With an encoder, and many passages."""
    monkeypatch.setattr(cuts, "LIMIT_TOKENS", 40)
    store = Path(shutil.copytree(store_folder, tmp_path / "store", ignore=shutil.ignore_patterns(PASSAGES, VECTORS)))
    encoder = save_bert("no head", tmp_path / "bert")
    with load(model_folder, [store], passage_encoder=encoder) as lm:
        make_vectors(store, lm.tokenizer, load_encoder(encoder))
        yield lm


def found(lm: LanguageModel, by: str, question: str, before: str = "", *, close: bool = False) -> tuple[Passage, ...]:
    request = FindPassagesRequest(question, by=by, k=1000)
    return run_steps(lm.engine.find_passages(request, before=before, close=close))


def scores(passages: tuple[Passage, ...]) -> dict[tuple[str, int], float]:
    return {(each.document_id, each.token_offset): each.score for each in passages}


@pytest.mark.parametrize("by", ["words", "meaning"])
def test_the_score_is_that_of_the_question_and_a_share_of_that_of_the_earlier_one(lm: LanguageModel, by: str) -> None:
    own, earlier, both = (scores(found(lm, by, *asked)) for asked in ((QUESTION,), (BEFORE,), (QUESTION, BEFORE)))
    assert set(both) == set(own) | set(earlier)
    for place, score in both.items():
        assert score == pytest.approx(own.get(place, 0.0) + EARLIER * earlier.get(place, 0.0), abs=1e-5)
    assert list(both.values()) == sorted(both.values(), reverse=True)
    assert list(both) != list(own)  # it makes a difference


def test_by_auto_both_sums_are_added(lm: LanguageModel) -> None:
    words, cosines, both = (scores(found(lm, by, QUESTION, BEFORE)) for by in ("words", "meaning", "auto"))
    mosts = {words[place] / (both[place] - cosines[place]) for place in both if words.get(place)}
    assert min(mosts) == pytest.approx(max(mosts), rel=1e-3)  # of the words with their shares


def test_a_word_that_is_asked_again_counts_once_and_wholly(lm: LanguageModel) -> None:
    alone = scores(found(lm, "words", QUESTION))
    assert scores(found(lm, "words", QUESTION, f"{QUESTION}, {QUESTION}?")) == alone


def test_the_sentence_is_the_one_for_the_question_alone(lm: LanguageModel) -> None:
    alone = {(each.document_id, each.token_offset): each.sentence for each in found(lm, "meaning", QUESTION)}
    behind = {(each.document_id, each.token_offset): each.sentence for each in found(lm, "meaning", QUESTION, BEFORE)}
    assert behind == alone


def test_a_passage_is_close_by_both_cosines_and_the_words_of_both(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cosines, sums = (scores(found(lm, by, QUESTION, BEFORE)) for by in ("meaning", "auto"))
    middle = sorted(cosines.values())[len(cosines) // 2]
    monkeypatch.setattr(type(lm.engine.passage_encoder), "close_cosine", middle)
    expected = {
        place
        for place in sums
        if cosines[place] >= middle
        or (cosines[place] >= middle - NEARLY_CLOSE and sums[place] - cosines[place] >= MANY_WORDS_BEHIND)
    }
    assert set(scores(found(lm, "auto", QUESTION, BEFORE, close=True))) == expected
    assert 0 < len(expected) < len(sums)
