"""Experts of domains: rows by their labels, learning by command, copies, and the posterior over domains (DEMix)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of
from training_runs import TINY, Killed, kill_at
from typer.testing import CliRunner
from zoo.twins import ZooTwin

from memlm.cli.app import app
from memlm.data.corpus import Corpus
from memlm.errors import Incompatible, InvalidInput, NotFound
from memlm.index.store.exclusion import search_views
from memlm.indexing.build import build_index
from memlm.language_model import load
from memlm.model import Decoder, DecoderState, ModelConfig
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint
from memlm.model.state.pool import StatePool
from memlm.server.config import ServerConfig
from memlm.server.inference.startup import _load_model
from memlm.training.config import TrainConfig
from memlm.training.recipe import recipe_of
from memlm.training.train import train
from memlm.zoo.demix.domains import (
    Domains,
    domains_of,
    fix_domain,
    set_domains,
    use_domain,
    with_domain,
    without_domain,
)
from memlm.zoo.demix.model_mixture import ModelMixture

NAMES = ("books", "code", "mail")
CONFIG = replace(SHAPE, context_length=40, layers=[{"channel": Domains(NAMES)}])


def state_of(decoder: Decoder, *domains: int, **options) -> DecoderState:
    state = decoder.new_state(batch_size=len(domains), capacity=40, **options)
    set_domains(state, domains)
    return state


def alone(decoder: Decoder, domain: int, tokens: list[int]) -> np.ndarray:
    return ZooTwin(decoder, domain).logits(tokens)


def test_each_row_is_read_by_the_experts_of_its_domain():
    decoder, texts = make(CONFIG), [tokens_of(12, seed) for seed in range(4)]
    with torch.inference_mode():
        read = decoder.logits(decoder(torch.tensor(texts), state_of(decoder, 2, 0, 1, 2))[0])
    for got, text, domain in zip(read, texts, (2, 0, 1, 2), strict=True):
        np.testing.assert_allclose(got, alone(decoder, domain, text), atol=1e-9, rtol=1e-9)


def test_forks_saved_states_pools_and_drafts_keep_the_domain():
    decoder, text = make(CONFIG), tokens_of(14)
    expected = alone(decoder, 1, text)
    state = state_of(decoder, 1)
    logits(decoder, text[:8], state)
    pool = StatePool(decoder, most_rows=2, capacity=40)
    pool.grow(2, 40)
    pool.add_row(state_of(decoder, 2))
    pool.add_row(state.fork())
    for held in (state.fork(), DecoderState.restore(state.save(), CONFIG), pool.state.extract_row(1, capacity=40)):
        np.testing.assert_allclose(logits(decoder, text[8:], held), expected[8:], atol=1e-9, rtol=1e-9)
    logits(decoder, [*text[8:10], 3, 5], state)
    assert not state.crop([10])  # nothing is read again
    np.testing.assert_allclose(logits(decoder, text[10:], state), expected[10:], atol=1e-9, rtol=1e-9)


def test_a_domain_may_be_fixed_for_all_rows_without_one():
    decoder, text = make(CONFIG), tokens_of(9)
    use_domain(decoder, "mail")
    np.testing.assert_allclose(logits(decoder, text), alone(decoder, 2, text), atol=1e-9, rtol=1e-9)
    np.testing.assert_allclose(
        logits(decoder, text, state_of(decoder, 0)), alone(decoder, 0, text), atol=1e-9, rtol=1e-9
    )
    with pytest.raises(NotFound, match="its domains are books, code, mail"):
        use_domain(decoder, "films")


def test_a_copy_of_a_domain_reads_as_it_did_and_the_removal_of_one_changes_no_other():
    decoder, text = make(replace(CONFIG, num_layers=2, layers=[{"channel": Domains(NAMES)}, {}])), tokens_of(9)
    grown = with_domain(decoder, "films", like="code")
    assert domains_of(grown.config) == (*NAMES, "films")
    for number, same in enumerate((0, 1, 2, 1)):
        assert np.array_equal(
            logits(grown, text, state_of(grown, number)), logits(decoder, text, state_of(decoder, same))
        )
    with torch.no_grad():
        for parameter in grown.blocks[0].ff.experts[3].parameters():
            parameter.mul_(2)
    rest = without_domain(grown, "books")
    assert domains_of(rest.config) == ("code", "mail", "films")
    for number, same in enumerate((1, 2, 3)):
        assert np.array_equal(logits(rest, text, state_of(rest, number)), logits(grown, text, state_of(grown, same)))
    assert not np.array_equal(logits(rest, text, state_of(rest, 2)), logits(decoder, text, state_of(decoder, 1)))
    with pytest.raises(InvalidInput, match="already"):
        with_domain(decoder, "code", like="books")
    with pytest.raises(NotFound, match="films"):
        with_domain(decoder, "new", like="films")
    with pytest.raises(InvalidInput, match="only domain"):
        without_domain(make(replace(CONFIG, layers=[{"channel": Domains(("books",))}])), "books")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A model whose domains are sure enough to differ, in `all`, and each domain as a plain model of its name."""
    root, shape = tmp_path_factory.mktemp("demix"), {"dim": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    config = ModelConfig(
        tokenizer.vocab_size, **shape, ff_dim=16, context_length=64, layers=[{"channel": Domains(NAMES)}]
    )
    torch.manual_seed(0)
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(3)
    save_checkpoint(root / "all", decoder, tokenizer)
    for number, name in enumerate(NAMES):
        plain = Decoder(replace(config, layers=()))
        weights = decoder.weights()
        plain.load_state_dict({n: weights[n.replace(".ff.", f".ff.experts.{number}.")] for n in plain.weights()}, False)
        save_checkpoint(root / name, plain, tokenizer)
    return root


@pytest.mark.parametrize(("prior", "top"), [((), 0), ((0.5, 0.3, 0.2), 2)])
def test_domains_mix_as_models_with_their_experts_do(folder, prior, top):
    text = "the memory of a model, and the stream ends with the call"
    mixture = ModelMixture([folder / "all"], prior=prior, top=top)
    models = ModelMixture([folder / name for name in NAMES], prior=prior, top=top)
    assert mixture.score(text) == pytest.approx(models.score(text), abs=1e-5)
    assert mixture.posterior == pytest.approx(models.posterior, abs=1e-5)
    assert max(mixture.posterior) > 0.6
    options = {"max_tokens": 12, "temperature": 0}
    assert str(mixture.generate(text, **options).result()) == str(models.generate(text, **options).result())


def run(*command: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in command])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_fixed_domain_is_the_model_of_it_alone(folder, corpus_folder):
    text, prompt = (corpus_folder / "doc-5.txt").read_text(), "the page of the memory"
    for name in NAMES:
        with load(folder / "all") as lm, load(folder / name) as alone:
            fix_domain(lm, name)
            assert lm.score(text).bits_per_byte == pytest.approx(alone.score(text).bits_per_byte, rel=1e-6)
            drawn = [each.generate(prompt, max_tokens=16, temperature=0).result().text for each in (lm, alone)]
        assert drawn[0] == drawn[1]


def test_a_server_refuses_experts_of_domains(folder):
    with pytest.raises(Incompatible, match="a server chooses none"):
        _load_model(
            ServerConfig(model=folder / "all"), {}, 0, may_fail=(), on_lost=lambda store, ids: None,
            search=search_views,
        )  # fmt: skip


@pytest.fixture
def domains(tmp_path):
    """Two languages that share their letters, where all but the first letter of a word follows from the domain."""
    for name, step in (("up", 1), ("down", -1)):
        (tmp_path / name).mkdir()
        for document in range(6):
            generator = np.random.default_rng(document)
            starts = generator.integers(26, size=60)
            words = ["".join(chr(97 + (start + step * place) % 26) for place in range(6)) for start in starts]
            (tmp_path / name / f"{document}.txt").write_text(" ".join(words))
    return tmp_path


def settings_of(**changes) -> TrainConfig:
    fields = {"layers": [{"channel": {"kind": "domain", "names": ["up", "down"]}}]}
    return replace(TINY, model_fields=fields, vocab_size=270, dtype="float32", **changes)


def test_each_path_of_the_corpus_is_a_domain_that_its_experts_learn(domains, tmp_path):
    (tmp_path / "demix.toml").write_text(
        "dim = 32\nnum_layers = 2\nnum_heads = 2\nnum_kv_heads = 2\nff_dim = 64\ncontext_length = 32\n"
        'vocab_size = 270\n\n[model]\nlayers = [{channel = {kind = "domain", names = ["up", "down"]}}]\n'
    )
    model = tmp_path / "model"
    run(
        "train", domains / "up", domains / "down", "--config", tmp_path / "demix.toml", "--steps", 150, "--out", model,
        "--batch-size", 4,
    )  # fmt: skip
    bits = {}
    for name in ("up", "down"):
        with load(model) as lm:
            fix_domain(lm, name)
            for text in ("up", "down"):
                bits[text, name] = lm.score((domains / text / "0.txt").read_text()).bits_per_byte
    assert bits["up", "up"] < bits["up", "down"] - 0.5
    assert bits["down", "down"] < bits["down", "up"] - 0.5
    mixture = ModelMixture([model])
    mixture.score("abcdef klmnop")
    assert mixture.posterior[0] > 0.9
    mixture.score("fedcba ponmlk")
    assert mixture.posterior[1] > 0.9


def test_a_resumed_run_reads_the_same_rows_of_each_domain(domains, tmp_path):
    corpus, settings = Corpus([domains / "up", domains / "down"]), settings_of(steps=6, checkpoint_every=2)
    whole = train(corpus, tmp_path / "whole", settings)
    with pytest.raises(Killed):
        train(corpus, tmp_path / "killed", settings, progress=kill_at(3))
    assert train(corpus, tmp_path / "killed", resume=True).losses == whole.losses
    assert load_checkpoint(tmp_path / "killed").fingerprint == load_checkpoint(tmp_path / "whole").fingerprint


def test_keys_are_of_the_first_domain(domains, tmp_path):
    corpus = Corpus([domains / "up", domains / "down"])
    train(corpus, tmp_path / "model", settings_of(steps=1))
    build_index(tmp_path / "model", Corpus([domains / "up"]), tmp_path / "store", check="none")
    with load(tmp_path / "model", [tmp_path / "store"]) as lm:
        fix_domain(lm, "up")
        with pytest.raises(InvalidInput, match="'store' were made in the domain 'up'"):
            fix_domain(lm, "down")
    with load(tmp_path / "model") as lm:
        fix_domain(lm, "down")
        with pytest.raises(NotFound, match="its domains are up, down"):
            fix_domain(lm, "left")


def test_each_row_has_a_domain():
    state = make(CONFIG).new_state(batch_size=3, capacity=8)
    for wrong in ([1], [0, 1, -1]):
        with pytest.raises(ValueError, match="3 rows"):
            set_domains(state, wrong)


def test_what_has_no_meaning_is_refused(domains, tmp_path):
    corpus, out = Corpus([domains / "up", domains / "down"]), tmp_path / "m"
    with pytest.raises(InvalidInput, match="give a path for each"):
        train(Corpus([domains / "up"]), out, settings_of())
    with pytest.raises(InvalidInput, match="batch_size of 2"):
        train(corpus, out, settings_of(batch_size=1))
    with pytest.raises(InvalidInput, match="leave --valid out"):
        train(corpus, out, settings_of(), valid=corpus)
    assert not out.exists()
    with pytest.raises(InvalidInput, match="domain and retro learn in ways of their own"):
        recipe_of(TINY, replace(CONFIG, cross="retro"))
    for names in ((), ("a", "a"), ("",), (3,)):
        with pytest.raises(InvalidInput, match="names of the domains"):
            Domains(names)
    with pytest.raises(InvalidInput, match="the same names"):
        replace(CONFIG, num_layers=2, layers=[{"channel": Domains(("a",))}, {"channel": Domains(("b",))}])
