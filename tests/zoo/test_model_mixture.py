"""A mixture of models: the posterior over the whole text, its priors, and the mean of parameters."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from memlm.cli.app import app
from memlm.data.tokenizer import Tokenizer
from memlm.errors import AlreadyExists, Incompatible, InvalidInput
from memlm.language_model import load
from memlm.model import Decoder, ModelConfig
from memlm.model.files.averages import average_models
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint
from memlm.zoo.demix import model_mixture
from memlm.zoo.demix.model_mixture import MixedText, ModelMixture, Reader, best_of

TEXT = "the memory of a model, and the stream ends with the call"


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    """Three models of one shape and tokenizer, sure enough to differ."""
    root = tmp_path_factory.mktemp("domains")
    config = ModelConfig(
        tokenizer.vocab_size, dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ff_dim=16, context_length=64
    )
    for seed, name in enumerate(("books", "code", "mail")):
        torch.manual_seed(seed)
        decoder = Decoder(config)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.mul_(3)
        save_checkpoint(root / name, decoder, tokenizer)
    return [root / name for name in ("books", "code", "mail")]


def ids_of(folders, text=TEXT):
    tokenizer = load_checkpoint(folders[0]).tokenizer
    return [tokenizer.start_id, *tokenizer.encode(text).tolist()]


def alone(folder, ids):
    """Log-probabilities (T, V) of a model, in float64 from its logits."""
    decoder = load_checkpoint(folder).decoder
    with torch.inference_mode():
        logits = decoder.logits(decoder(torch.tensor([ids]))[0][0]).double().numpy()
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def bayes(folders, ids, prior, top=0):
    """The mixture's log-probability of each token, and the posterior after all, term by term."""
    each, found = [alone(folder, ids) for folder in folders], []
    joint = [math.log(p) for p in prior]
    for t in range(len(ids) - 1):
        best = sorted(range(len(folders)), key=lambda d: -joint[d])[: top or len(folders)]
        total = sum(math.exp(joint[d]) for d in best)
        found.append(math.log(sum(math.exp(joint[d]) / total * math.exp(each[d][t, ids[t + 1]]) for d in best)))
        joint = [joint[d] + each[d][t, ids[t + 1]] for d in range(len(folders))]
    total = sum(math.exp(j) for j in joint)
    return found, [math.exp(j) / total for j in joint]


@pytest.mark.parametrize(("prior", "top"), [((1, 1, 1), 0), ((0.5, 0.3, 0.2), 0), ((0.5, 0.3, 0.2), 2), ((1, 2, 3), 1)])
@pytest.mark.parametrize("piece", [64, 3])
def test_the_posterior_follows_from_all_tokens_so_far(folders, prior, top, piece, monkeypatch):
    monkeypatch.setattr(model_mixture, "PIECE_TOKENS", piece)
    ids = ids_of(folders)
    prior = [p / sum(prior) for p in prior]
    expected, posterior = bayes(folders, ids, prior, top)
    mixture = ModelMixture(folders, prior=prior, top=top)
    assert mixture.score(TEXT) == pytest.approx(-np.mean(expected), abs=1e-4)
    assert mixture.posterior == pytest.approx(posterior, abs=1e-4)
    assert max(posterior) - min(posterior) > 0.3  # the models differ


def test_the_product_of_the_mixtures_is_the_mean_over_whole_texts(folders):
    ids = ids_of(folders)
    texts = [sum(alone(f, ids)[t, ids[t + 1]] for t in range(len(ids) - 1)) for f in folders]
    expected = math.log(sum(math.exp(text) for text in texts) / 3)
    assert -ModelMixture(folders).score(TEXT) * (len(ids) - 1) == pytest.approx(expected, abs=1e-3)


def test_equal_models_mix_to_the_model(folders):
    ids, checkpoints = ids_of(folders), [load_checkpoint(folders[1])] * 2
    text = MixedText([Reader(each) for each in checkpoints], [0.3, 0.7], top=0, capacity=64)
    np.testing.assert_allclose(text.read(ids).numpy(), alone(folders[1], ids)[-1], atol=1e-5)
    assert text.posterior == pytest.approx([0.3, 0.7])


def test_texts_are_generated_from_the_mixture_after_the_prompt(folders):
    with load(folders[0]) as lm:
        expected, prompt = list[int](), lm.tokenizer.prompt("the memory of")
    text = MixedText([Reader(load_checkpoint(f)) for f in folders], [1, 1, 1], top=0, capacity=64)
    ids = prompt
    for _ in range(10):
        expected.append(int(text.read(ids).argmax()))
        ids = expected[-1:]
    mixture = ModelMixture(folders)
    drawn = [token.id for token in mixture.generate("the memory of", temperature=0.0, max_tokens=10)]
    assert drawn == expected[: len(drawn)]
    assert len(drawn) > 3
    assert mixture.posterior != mixture.prior


def test_priors_stay_learn_or_follow_the_texts(folders):
    still = ModelMixture(folders)
    still.score(TEXT)
    assert still.prior == (1 / 3,) * 3
    learned, q = still.learn_prior([TEXT]), still.posterior
    assert learned == pytest.approx([0.7 / 3 + 0.3 * p for p in q])
    follows = ModelMixture(folders, updates=True)
    follows.score(TEXT)
    assert follows.prior == pytest.approx(learned)
    follows.generate("the", max_tokens=2).result()
    assert follows.prior == pytest.approx([0.7 * p + 0.3 * q for p, q in zip(learned, follows.posterior, strict=True)])


def test_the_best_models_share_the_weight_of_the_others():
    weights = torch.tensor([[0.5, 0.1], [0.3, 0.3], [0.2, 0.6]]).double().log()
    expected = torch.tensor([[0.625, 0.0], [0.375, 1 / 3], [0.0, 2 / 3]]).double()
    torch.testing.assert_close(best_of(weights, 2).exp(), expected)
    assert best_of(weights, 0) is weights


@pytest.mark.parametrize("top", [1, 2])
def test_as_many_models_are_left_where_weights_are_equal(top):
    weights = torch.tensor([[0.2, 0.4], [0.4, 0.2], [0.4, 0.4]]).double().log()
    best = {1: [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]], 2: [[0.0, 0.5], [0.5, 0.0], [0.5, 0.5]]}[top]  # the first ones
    torch.testing.assert_close(best_of(weights, top).exp(), torch.tensor(best).double())


def test_the_mean_of_models_is_that_of_their_parameters(folders, tmp_path):
    average_models(folders[:2], tmp_path / "mean", [1, 3])
    got, (first, second) = load_checkpoint(tmp_path / "mean").decoder, [load_checkpoint(f).decoder for f in folders[:2]]
    for name, tensor in got.state_dict().items():
        expected = 0.25 * first.state_dict()[name] + 0.75 * second.state_dict()[name]
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)
    average_models([folders[0]] * 3, tmp_path / "same")
    for name, tensor in load_checkpoint(tmp_path / "same").decoder.state_dict().items():
        torch.testing.assert_close(tensor, first.state_dict()[name], atol=1e-6, rtol=0)
    with pytest.raises(AlreadyExists):
        average_models(folders, tmp_path / "mean")
    with pytest.raises(InvalidInput, match="give each a weight"):
        average_models(folders, tmp_path / "other", [1.0])


def test_models_that_do_not_fit_together_are_refused(folders, tmp_path):
    config = load_checkpoint(folders[0]).decoder.config
    other = Tokenizer.train(["some other words " * 50], vocab_size=config.vocab_size)
    save_checkpoint(tmp_path / "other", Decoder(config), other)
    with pytest.raises(Incompatible, match="another tokenizer"):
        ModelMixture([folders[0], tmp_path / "other"])
    with pytest.raises(Incompatible, match="shape or tokenizer"):
        average_models([folders[0], tmp_path / "other"], tmp_path / "mean")
    save_checkpoint(
        tmp_path / "padded",
        Decoder(replace(config, vocab_size=config.vocab_size + 8)),
        load_checkpoint(folders[0]).tokenizer,
    )
    with pytest.raises(Incompatible, match=f"predicts {config.vocab_size + 8} tokens .* {config.vocab_size}; expected"):
        ModelMixture([folders[0], tmp_path / "padded"])
    for bad, message in (({"prior": [1.0]}, "prior"), ({"top": 4}, "top"), ({"prior": [1, 0, 1]}, "above 0")):
        with pytest.raises(InvalidInput, match=message):
            ModelMixture(folders, **bad)
    with pytest.raises(InvalidInput, match="no models"):
        ModelMixture([])
    for option in ({"session": "x"}, {"adapter": "x"}, {"early_exit": True}):
        with pytest.raises(InvalidInput, match="belongs to one model"):
            ModelMixture(folders).generate("the", **option)
    with pytest.raises(InvalidInput, match="empty"):
        ModelMixture(folders).score("")


def test_options_of_datastores_are_refused_and_a_stream_that_is_closed_early_changes_nothing(folders):
    mixture = ModelMixture(folders, updates=True)
    for option in (
        {"store": "x"}, {"stores": ["x"]}, {"lam": 0.5}, {"k": 3}, {"context_cache": 9}, {"spalm": True},
        {"exclude_documents": "x"}, {"loop_guard": False}, {"neighbors": 2}, {"drafts": 3}, {"draft": "x"},
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match="neither datastores nor drafts; leave it out") as refused:
            mixture.generate("the", **option)
        assert refused.value.field == next(iter(option))
    with mixture.generate("the", use_store=False, drafts=0, max_tokens=9) as tokens:
        next(tokens)
    assert mixture.prior == mixture.posterior == (1 / 3,) * 3


def test_the_command_averages(folders, tmp_path):
    runner = CliRunner()
    result = runner.invoke(
        app, ["models", "average", *map(str, folders), "--weights", "1,1,2", "--out", str(tmp_path / "mean")]
    )
    assert result.exit_code == 0, result.output
    assert load_checkpoint(tmp_path / "mean").decoder.config.dim == 16
