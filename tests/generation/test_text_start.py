"""How a text begins: with a datastore, build, search, score, generate and sessions begin alike."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from other_families import save_as_others_do
from texts import make_text
from transformers import AutoModelForCausalLM

from memlm.data.corpus import Corpus
from memlm.errors import Incompatible
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.retrieval.store import check_fingerprints

RETRIEVAL = {"k": 4, "lam": 0.5, "knn_temperature": 1.0, "neighbors": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """A model whose tokenizer puts nothing before a text, as those of SmolLM2, Qwen and GPT-2 do."""
    return save_as_others_do("llama", tmp_path_factory.mktemp("llama"), tokenizer)


@pytest.fixture(scope="module")
def checkpoint(folder) -> Checkpoint:
    checkpoint = load_checkpoint(folder)
    assert checkpoint.tokenizer.special.prefix == ()
    return checkpoint


@pytest.fixture(scope="module")
def store(checkpoint, tmp_path_factory) -> Path:
    corpus = tmp_path_factory.mktemp("corpus")
    for number in range(3):
        (corpus / f"{number}.txt").write_text(make_text(number, 30))
    return build_index(checkpoint, Corpus([corpus]), tmp_path_factory.mktemp("stores") / "store").path


@pytest.fixture
def lm(checkpoint, store) -> LanguageModel:
    return LanguageModel(checkpoint, [store])


@pytest.fixture(scope="module")
def prompt(checkpoint) -> str:
    """The first tokens of a stored document."""
    tokens = checkpoint.tokenizer.encode(make_text(1, 30))
    size = next(n for n in range(8, 20) if np.array_equal(encoded(checkpoint, tokens[:n]), tokens[:n]))
    return checkpoint.tokenizer.decode(tokens[:size].tolist())


def encoded(checkpoint: Checkpoint, tokens: np.ndarray) -> np.ndarray:
    return checkpoint.tokenizer.encode(checkpoint.tokenizer.decode(tokens.tolist()))


def test_a_prompt_finds_the_document_that_it_begins_on_every_way(lm, prompt):
    place = ("1.txt", len(lm.tokenize(prompt)))
    (generated,) = lm.generate(prompt, max_tokens=1, seed=1, **RETRIEVAL)
    with lm.session() as session:
        (continued,) = session.generate(prompt, max_tokens=1, seed=1, **RETRIEVAL)
    with lm.session() as session:
        session.append(prompt)
        (appended,) = session.generate("", max_tokens=1, seed=1, **RETRIEVAL)
    searched = lm.search(None, prompt, k=4)
    for neighbors in (generated.neighbors, continued.neighbors, appended.neighbors, searched):
        assert (neighbors[0].document_id, neighbors[0].token_offset) == place
        assert neighbors[0].distance < 1e-3
    assert generated.logprob == pytest.approx(continued.logprob, abs=1e-5)
    assert generated.logprob == pytest.approx(appended.logprob, abs=1e-5)


def test_scoring_gives_a_generated_token_the_probability_that_it_had(lm, prompt):
    options = {name: value for name, value in RETRIEVAL.items() if name != "neighbors"}
    (token,) = lm.generate(prompt, max_tokens=1, temperature=0, **options)
    ids = [*lm.tokenize(prompt), token.id]
    if lm.tokenize(lm.detokenize(ids)) == ids:
        scored = lm.score(lm.detokenize(ids), token_scores=True, **options)
        assert scored.token_scores[-1].logprob == pytest.approx(token.logprob, abs=1e-3)


def test_without_a_datastore_a_prompt_begins_as_transformers_begins_it(lm, folder, prompt):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = lm.tokenize(prompt)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)[0, len(ids) :].tolist()
    assert [token.id for token in lm.generate(prompt, max_tokens=5, temperature=0, use_store=False)] == expected


def test_lam_0_is_the_model_also_where_a_text_begins_with_nothing(lm, prompt):
    alone = [(token.id, token.logprob) for token in lm.generate(prompt, max_tokens=5, seed=1, use_store=False)]
    assert [(token.id, token.logprob) for token in lm.generate(prompt, max_tokens=5, seed=1, lam=0.0)] == alone


def test_a_store_names_the_token_that_its_documents_begin_with(lm, checkpoint, store):
    manifest = lm.engine.stores.model_store().datastore.manifest
    assert manifest.spec.start_id == checkpoint.tokenizer.start_id
    other = replace(manifest, spec=replace(manifest.spec, start_id=7))
    with pytest.raises(Incompatible, match="begin with the token 7"):
        check_fingerprints(other, path=store, checkpoint=checkpoint)
