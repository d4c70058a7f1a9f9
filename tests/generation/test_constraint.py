"""A text that must have a form: in every way of generating, with its probabilities and shares untouched."""

import json
import re
from typing import Any

import pytest
from running import alike

from memlm.api.generation import FinishReason
from memlm.errors import InvalidInput
from memlm.language_model import LanguageModel

FORM = r'\{"port": [0-9]{1,2}, "note": "[a-z]{1,5}"\}'
OPTIONS: dict[str, Any] = {"regex": FORM, "seed": 4}


def text_of(tokens: Any) -> str:
    return "".join(token.text for token in tokens)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1.5}, {"top_k": 2, "repetition_penalty": 1.2}]
)
def test_a_text_has_its_form(lm: LanguageModel, sampling: dict[str, Any]) -> None:
    completion = lm.generate("a model", **OPTIONS, **sampling).result()
    assert completion.finished.reason is FinishReason.END
    assert re.fullmatch(FORM, completion.text)


def test_probabilities_and_shares_are_those_of_the_text_without_a_form(lm: LanguageModel) -> None:
    prompt = lm.tokenize("a model can be read")
    tokens = lm.generate(prompt, **OPTIONS, lam=0.4, neighbors=2, loop_guard=False).result().tokens
    ids = [*prompt, *(token.id for token in tokens)]
    scored = lm.score(ids, lam=0.4, token_scores=True).token_scores[-len(tokens) :]
    assert [each.logprob for each in tokens] == pytest.approx([each.logprob for each in scored], abs=1e-4)
    assert all(token.lam == pytest.approx(0.4) and len(token.neighbors) == 2 for token in tokens)


def test_drafts_change_nothing(lm: LanguageModel) -> None:
    draft = '{"port": 7, "note": "a model"}'
    plain = lm.generate("a model", **OPTIONS, temperature=0, drafts=0).result()
    drafted = lm.generate("a model", **OPTIONS, temperature=0, drafts=4, draft=draft).result()
    assert sum(each.drafted for each in drafted.finished.usage.drafts)
    assert alike(drafted.tokens, plain.tokens)


def test_texts_of_one_batch_have_the_form_each(lm: LanguageModel) -> None:
    together = lm.generate(["a model", "the"], regex="[0-9]{5}", seed=1)
    assert all(each.text.isdecimal() and len(each.text) == 5 for each in together)


def test_a_session_goes_on_after_a_form(lm: LanguageModel) -> None:
    session = lm.session()
    assert text_of(session.generate("a model", choices=["yes", "no"])) in ("yes", "no")
    assert text_of(session.generate(" and", max_tokens=5, seed=1))


def test_an_answer_has_its_form(lm: LanguageModel) -> None:
    answer = lm.answer("Which model?", json_schema={"enum": [1, "a", None]}, seed=1)
    assert json.loads(answer.text) in (1, "a", None)


def test_a_limit_cuts_within_the_form(lm: LanguageModel) -> None:
    completion = lm.generate("a model", **OPTIONS, max_tokens=3).result()
    assert completion.finished.reason is FinishReason.LENGTH
    assert completion.text.startswith("{")


def test_a_wrong_form_leaves_the_session_as_it_was(lm: LanguageModel) -> None:
    session = lm.session()
    list(session.generate("a model", max_tokens=3, seed=1))
    before = session.info()
    with pytest.raises(InvalidInput, match="unclosed"):
        session.generate("x", regex="[")
    assert session.info().num_tokens == before.num_tokens
    assert text_of(session.generate("x", max_tokens=2, seed=1))


def test_equal_requests_give_equal_texts(lm: LanguageModel) -> None:
    first, second = (lm.generate("a model", **OPTIONS).result().tokens for _ in range(2))
    assert alike(first, second)
