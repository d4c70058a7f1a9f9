"""The mixture in `transformers` is that of memlm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from other_families import save_as_others_do
from texts import make_text
from transformers import AutoModelForCausalLM

from memlm.data.corpus import Corpus
from memlm.errors import Incompatible, InvalidInput
from memlm.indexing.build import build_index
from memlm.integrations.transformers import DatastoreProcessor
from memlm.language_model import LanguageModel, load

RETRIEVAL = {"k": 4, "lam": 0.6, "knn_temperature": 3.0}


@pytest.fixture(params=["llama", "gpt2", "gpt_neox", "gemma3", "olmo2", "qwen3"], scope="module")
def folder(request, tmp_path_factory, tokenizer) -> Path:
    return save_as_others_do(request.param, tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture(scope="module")
def lm(folder, tmp_path_factory) -> LanguageModel:
    corpus = tmp_path_factory.mktemp("corpus")
    for number in range(3):
        (corpus / f"{number}.txt").write_text(make_text(number, 60))
    store = build_index(folder, Corpus([corpus]), tmp_path_factory.mktemp("stores") / "store", dtype="float32").path
    return load(folder, [store], dtype="float32")


@pytest.fixture(scope="module")
def theirs(folder) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def ids_of(lm: LanguageModel, text: str) -> list[int]:
    return [lm.tokenizer.start_id, *lm.tokenize(text)]


def generated(theirs: torch.nn.Module, prompts: list[list[int]], processors: list, **options) -> Any:
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 299, "pad_token_id": 0, **options}
    done = theirs.generate(padded, attention_mask=mask, logits_processor=processors, **options)
    return done[:, longest:] if isinstance(done, torch.Tensor) else done


@pytest.mark.parametrize("prompt", ["the memory of", "a page, a"])
def test_greedy_text_is_that_of_memlm(lm, theirs, prompt):
    ids = ids_of(lm, prompt)
    expected = list(lm.generate(ids, max_tokens=12, temperature=0, loop_guard=False, **RETRIEVAL))
    with DatastoreProcessor(theirs, lm, **RETRIEVAL) as processor:
        found = generated(theirs, [ids], [processor])[0].tolist()
    alone = generated(theirs, [ids], [])[0].tolist()
    assert found == [token.id for token in expected][: len(found)]  # 299 ends theirs
    assert found != alone


def test_scores_are_the_log_probabilities_of_the_mixture(lm, theirs):
    prompts = [ids_of(lm, text) for text in ("the memory of a", "page", "it is silent: the page")]
    with DatastoreProcessor(theirs, lm, **RETRIEVAL) as processor:
        done = generated(
            theirs, prompts[:1], [processor], max_new_tokens=1, return_dict_in_generate=True, output_scores=True
        )
        batch = generated(theirs, prompts, [processor], max_new_tokens=6)
        apart = [generated(theirs, [ids], [processor], max_new_tokens=6)[0].tolist() for ids in prompts]
    ended = [row[: len(alone)] for row, alone in zip(batch.tolist(), apart, strict=True)]  # behind 299 comes padding
    assert ended == apart
    (scores_BV,) = done.scores
    assert torch.logsumexp(scores_BV, dim=-1) == pytest.approx(0.0, abs=1e-4)
    (token,) = lm.generate(prompts[0], max_tokens=1, temperature=0, loop_guard=False, **RETRIEVAL)
    assert float(scores_BV[0, token.id]) == pytest.approx(token.logprob, abs=1e-3)


def test_beams_and_sampling_run_and_the_hook_goes(lm, theirs):
    with DatastoreProcessor(theirs, lm, **RETRIEVAL) as processor:
        generated(theirs, [ids_of(lm, "the")], [processor], num_beams=3)
        generated(theirs, [ids_of(lm, "the")], [processor], do_sample=True)
    assert not any(part._forward_pre_hooks for part in theirs.modules())


def test_what_cannot_be_mixed_is_refused(lm, theirs, folder):
    with load(folder) as alone, pytest.raises(InvalidInput, match="no datastore with keys is loaded"):
        DatastoreProcessor(theirs, alone)
    with pytest.raises(Incompatible, match="0 lists of blocks"):
        DatastoreProcessor(torch.nn.Linear(2, 2), lm)
