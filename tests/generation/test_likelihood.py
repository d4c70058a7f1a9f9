"""Logits and the likelihood of continuations equal those of the model read plainly, and of generated tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from other_families import save_as_others_do
from reference import decode_plainly
from transformers import AutoModelForCausalLM

from memlm.api.scoring import MAX_SCORE_ALTERNATIVES
from memlm.errors import InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.language_model import LanguageModel, load

CONTEXT = "the memory of a"
OPTIONS = [{"use_store": False}, {}, {"k": 4, "lam": 0.7, "knn_temperature": 1.0}]


def plain_likelihood(lm: LanguageModel, ids: list[int], new: list[int], **options) -> tuple[float, bool]:
    """Token by token: what is the likeliest, and what scoring says of the token."""
    total, is_greedy = 0.0, True
    for place, token_id in enumerate(new):
        read = [*ids, *new[:place]]
        total += lm.score([*read, token_id], token_scores=True, **options).token_scores[-1].logprob
        (token,) = lm.generate(read, temperature=0, max_tokens=1, top_logprobs=1, **options) or (None,)
        is_greedy = is_greedy and token is not None and token.top_logprobs[0].token_id == token_id
    return total, is_greedy


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_continuation_is_as_likely_as_its_tokens_one_by_one(lm, options):
    drawn = lm.generate(CONTEXT, temperature=0, max_tokens=4, **options).result()
    found = list[bool]()
    for continuation in (drawn.text, " model can", " zq"):
        ids = [lm.tokenizer.start_id, *lm.tokenize(CONTEXT)]
        new = lm.tokenize(CONTEXT + continuation)[len(ids) - 1 :]
        logprob, is_greedy = lm.loglikelihood(CONTEXT, continuation, **options)
        expected, expected_greedy = plain_likelihood(lm, ids, new, **options)
        assert logprob == pytest.approx(expected, abs=1e-3)
        assert is_greedy == expected_greedy
        found.append(is_greedy)
    as_drawn = lm.tokenize(CONTEXT + drawn.text) == [*lm.tokenize(CONTEXT), *(token.id for token in drawn.tokens)]
    assert as_drawn or not options.get("lam")  # without memory, random weights draw bytes that are no text
    assert found == [as_drawn, False, False]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("number", [1, 5])
def test_the_likeliest_tokens_of_a_text_are_those_that_generation_reports(lm, options, number):
    ids = [lm.tokenizer.start_id, *lm.tokenize("the memory of a model can be read, and the memory of a page")]
    scores = lm.score(ids, token_scores=True, top_logprobs=number, **options).token_scores
    plain = lm.score(ids, token_scores=True, **options).token_scores
    compared, own = 0, 0
    for place, score in enumerate(scores):
        assert replace(score, top_logprobs=()) == plain[place]
        drawn = lm.generate(ids[: place + 1], seed=1, max_tokens=1, top_logprobs=number, loop_guard=False, **options)
        for token in drawn:  # none where the model ends
            compared += 1
            for ours, theirs in zip(score.top_logprobs, token.top_logprobs, strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
                assert (ours.token_id, ours.text) == (theirs.token_id, theirs.text)
        equal = [each.logprob for each in score.top_logprobs if each.token_id == score.id]
        own += len(equal)
        assert equal in ([], [score.logprob])  # to the bit: clients compare them
    assert compared > 5
    assert own or not options.get("lam")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top_logprobs": 1}, "goes with token_scores"),
        ({"top_logprobs": -1, "token_scores": True}, "top_logprobs is -1"),
        ({"top_logprobs": 65, "token_scores": True}, "top_logprobs is 65"),
    ],
)
def test_likely_tokens_that_a_score_cannot_report_are_refused(lm, options, says):
    with pytest.raises(InvalidInput, match=says) as caught:
        lm.score("the memory", **options)
    assert caught.value.field == "top_logprobs"


def test_an_answer_of_too_many_likely_tokens_is_refused_before_the_model_reads(lm):
    with pytest.raises(InvalidInput, match="score the text in parts"):
        lm.score([1] * (MAX_SCORE_ALTERNATIVES // 64 + 2), token_scores=True, top_logprobs=64)


def test_an_empty_context_is_the_start_of_a_text(lm):
    logprob, _ = lm.loglikelihood("", "the memory", use_store=False)
    assert logprob == pytest.approx(-lm.score("the memory", use_store=False).nll, abs=1e-4)


@pytest.mark.parametrize(
    ("context", "continuation", "says"), [("a", "", "continuation is empty"), ("the " * 60, "a", "shorten the prompt")]
)
def test_what_has_no_likelihood_is_refused(lm, context, continuation, says):
    with pytest.raises(InvalidInput, match=says):
        lm.loglikelihood(context, continuation)


def test_logits_are_those_of_the_model_read_plainly(lm, checkpoint):
    ids = [lm.tokenizer.start_id, *lm.tokenize(CONTEXT)]
    logits_TV = lm.logits(CONTEXT)
    assert torch.equal(logits_TV, lm.logits(ids))
    assert logits_TV.shape == (len(ids), checkpoint.decoder.config.vocab_size)
    plain_TV = torch.as_tensor(decode_plainly(checkpoint.decoder, ids)[0])
    torch.testing.assert_close(logits_TV.log_softmax(-1).double(), plain_TV.double(), atol=1e-3, rtol=0)
    for wrong, says in (([300], "outside the vocabulary"), ([], "no token ids"), ([1] * 60, "shorten the prompt")):
        with pytest.raises(InvalidInput, match=says):
            lm.logits(wrong)


def test_keys_are_those_of_the_stored_documents(lm, store_folder, corpus_folder):
    text = (corpus_folder / "doc-7.txt").read_text()[:32]
    ids = lm.tokenize(text)
    keys_TD = lm.keys(text)
    assert keys_TD.shape == (len(ids) + 1, lm.info.dim)
    assert np.array_equal(keys_TD, lm.keys([lm.tokenizer.start_id, *ids]))
    with Datastore.open(store_folder) as store:
        found = store.search(keys_TD[:-1], 4)  # all positions at once
        assert found.distances_QK[:, 0] == pytest.approx(0, abs=1e-2)
        assert (found.values_QK == np.array(ids)[:, None])[1:].any(axis=1).all()  # 8 documents begin alike
        nearest = lm.search(None, text, k=1)[0]
        assert store.search(keys_TD[-1:], 1).distances_QK[0, 0] == pytest.approx(nearest.distance, abs=1e-2)
    for wrong, says in (([300], "outside the vocabulary"), ([], "no token ids"), ([1] * 60, "shorten the prompt")):
        with pytest.raises(InvalidInput, match=says):
            lm.keys(wrong)


def test_logits_equal_those_of_transformers(tmp_path, tokenizer):
    folder: Path = save_as_others_do("llama", tmp_path, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with load(folder) as lm, torch.inference_mode():
        ids = lm.tokenize(CONTEXT)
        expected_TV = model(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(lm.logits(CONTEXT), expected_TV, atol=1e-4, rtol=1e-4)
