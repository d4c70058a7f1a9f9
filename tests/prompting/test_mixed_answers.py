"""An answer from a mixture over passages says the share of each, in any order, and forgets deleted ones to the bit."""

from dataclasses import replace
from pathlib import Path

import pytest

from memlm.api.answers import Answer
from memlm.api.passages import Passage
from memlm.data.corpus import Document
from memlm.indexing.build import build_index
from memlm.language_model import load

QUESTION = "Which page has the port?"
TEXTS = {
    "ports": "the port of the page",
    "pages": "a page of a page",
    "secret": "Which page has the port of the memory",
    "notes": "the memory has a port",
    "more": "a port and a page and the end",
}
OPTIONS = {"mixture": True, "passages_by": "words", "num_passages": 4, "max_tokens": 8, "seed": 3}


def drawn(answer: Answer) -> list[tuple]:
    """All that a deletion could change in the tokens of an answer."""
    return [(each.id, each.text, each.logprob, each.passage_shares) for each in answer.completion.tokens]


def test_a_deleted_document_takes_its_row_with_it_and_changes_no_other_bit(model_folder: Path, tmp_path: Path) -> None:
    documents = [Document(name, text) for name, text in TEXTS.items()]
    without = [each for each in documents if each.id != "secret"]
    for folder, stored in (("with", documents), ("without", without)):
        build_index(model_folder, stored, tmp_path / folder / "store", check="none")
    answers = dict[str, Answer]()
    for folder in ("with", "without"):
        with load(model_folder, [tmp_path / folder / "store"], attention_window=44) as lm:
            answers[folder] = lm.answer(QUESTION, **OPTIONS)
            if folder == "with":
                answers["excluded"] = lm.answer(QUESTION, exclude_documents="secret", **OPTIONS)
                lm.delete_documents(["secret"])
                answers["deleted"] = lm.answer(QUESTION, **OPTIONS)
    with_it, never = answers["with"], answers["without"]
    assert "secret" in {each.document_id for each in with_it.passages}
    assert drawn(with_it) != drawn(never)
    for forgotten in (answers["deleted"], answers["excluded"]):
        assert len(forgotten.passages) == len(forgotten.passage_shares) == 4
        assert (drawn(forgotten), forgotten.passages) == (drawn(never), never.passages)
        assert (forgotten.prompt, forgotten.passage_shares) == (never.prompt, never.passage_shares)


def test_the_order_and_the_scores_of_given_passages_matter_neither_to_the_text_nor_to_the_shares(
    model_folder: Path,
) -> None:
    given = [Passage("s", name, "", 0, 9, text, 1.0) for name, text in TEXTS.items()]
    with load(model_folder, attention_window=44) as lm:
        plain = lm.answer(QUESTION, given, mixture=True, max_tokens=8, seed=3)
        by_name = dict(zip(TEXTS, plain.passage_shares, strict=True))
        for order in ([4, 2, 0, 1, 3], [1, 0, 4, 3, 2]):
            mixed = [replace(given[number], score=float(number)) for number in order]
            answer = lm.answer(QUESTION, mixed, mixture=True, max_tokens=8, seed=3)
            assert answer.text == plain.text
            shares = [by_name[passage.document_id] for passage in answer.passages]
            assert answer.passage_shares == pytest.approx(shares, abs=1e-6)
            for one, other in zip(answer.completion.tokens, plain.completion.tokens, strict=True):
                ordered = [other.passage_shares[number] for number in order]
                assert one.passage_shares == pytest.approx(ordered, abs=1e-6)
