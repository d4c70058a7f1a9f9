"""Configs of parts, the closed forms of patterns and experts, and models with parts in training and generation."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of
from training_runs import TINY
from zoo.twins import drawn as drawn_twin

from memlm.base.plugins import registered
from memlm.data.corpus import Corpus
from memlm.errors import Incompatible, InvalidInput
from memlm.language_model import LanguageModel
from memlm.model import ModelConfig
from memlm.model.adapters import LoRA, new_adapter
from memlm.model.attention.patterns import Pattern
from memlm.model.draws import drawn
from memlm.model.experts import Experts, HashExperts, Switch
from memlm.model.files.adapter_files import AdapterNames
from memlm.model.files.checkpoint import load_checkpoint
from memlm.model.parts import KNOWN, PARTS, Layer, part
from memlm.training.config import TrainConfig
from memlm.training.train import train

PLAIN = replace(SHAPE, context_length=40)


def test_every_known_kind_loads_under_its_name():
    names = [*registered(PARTS), *(f"{seam}.{kind}" for seam, kinds in KNOWN.items() for kind in kinds)]
    assert "mixer.hyper" in names  # also where nothing is installed
    for name in names:
        seam, _, kind = name.partition(".")
        known = part(seam, kind)
        assert (known.seam, known.kind) == (seam, kind)


def test_models_load_no_part_that_no_config_names():
    check = (
        "import sys, memlm.model.files.checkpoint\n"
        "assert not [name for name in sys.modules if name.startswith(('memlm.zoo', 'memlm.model.attention.patterns'))]"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_short_form_is_read_and_the_long_one_written():
    short = replace(PLAIN, layers=[{"mixer": "pattern", "rule": "global", "window": 5}, {"mixer": "attention"}])
    assert short.layers == (Layer(Pattern("global", window=5)), Layer())
    written = short.as_dict()["layers"]
    assert written[0]["mixer"]["kind"] == "pattern"
    assert written[0]["mixer"]["window"] == 5
    assert written[1] == {"mixer": "attention", "channel": "feed_forward"}
    assert ModelConfig.from_dict(json.loads(json.dumps(short.as_dict()))) == short


def test_a_plain_config_is_written_as_it_was_before_there_were_parts():
    assert not {"layers", "join", "stack", "border", "cross"} & PLAIN.as_dict().keys()
    spelled_out = {"join": "add", "stack": "plain", "border": "plain", "cross": "none"}
    assert replace(PLAIN, layers=[{"mixer": "attention"}], **spelled_out) == PLAIN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [{"mixer": "lattice"}]}, "'lattice'; this version has attention, .*pattern"),
        ({"layers": [{"mixer": "pattern", "width": 3}]}, "has no width; its keys are"),
        ({"layers": [{"rule": "global"}]}, "names no mixer"),
        ({"layers": ["pattern"]}, "expected a table"),
        ({"layers": "pattern"}, "expected a list of tables"),
        ({"layers": [{"mixer": {"kind": "attention", "rule": "global"}}]}, "takes no keys"),
        ({"layers": [{"mixer": Switch()}]}, "switch is a channel, and stands as a mixer"),
        ({"layers": [{"mixer": "pattern"}] * 3}, "3 layers do not repeat evenly through a depth of 2"),
        ({"layers": [{"mixer": "pattern", "rule": "spiral"}]}, "expected one of strided"),
        ({"layers": [{"channel": {"kind": "experts", "experts": 2, "top": 3}}]}, "top is 3 of 2 experts"),
        ({"layers": [{"channel": {"kind": "switch", "experts": 0}}]}, "experts is 0"),
        ({"layers": [{"mixer": "decay"}], "windows": (3, 3)}, "layer 0 is decay, which keeps no tokens for windows"),
        ({"layers": [{"mixer": "decay"}], "positions": "shaw"}, "decay has no scores that shaw positions"),
    ],
)
def test_configs_that_mean_nothing_are_refused_in_words(changes, message):
    with pytest.raises(InvalidInput, match=message):
        replace(PLAIN, **changes)


def test_a_part_of_another_version_is_refused():
    with pytest.raises(Incompatible, match="version 2; this memlm computes version 1"):
        part("mixer", {"kind": "pattern", "version": 2})


def test_another_package_brings_a_part_by_an_entry_point(tmp_path, monkeypatch):
    theirs = tmp_path / "theirs-1.0.dist-info"
    theirs.mkdir()
    (theirs / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (theirs / "entry_points.txt").write_text("[memlm.parts]\nmixer.theirs = memlm.model.attention.patterns:Pattern\n")
    monkeypatch.syspath_prepend(tmp_path)
    registered.cache_clear()
    try:
        assert part("mixer", {"kind": "theirs", "window": 3}) == Pattern(window=3)
    finally:
        registered.cache_clear()


def test_draws_are_those_of_splitmix64():
    places = torch.arange(6)[:, None], torch.arange(5)
    got = drawn(7, *places)
    assert got.tolist() == [[drawn_twin(7, a, b) for b in range(5)] for a in range(6)]
    assert drawn(0).item() == 0xE220A8397B1DCDAF & ((1 << 63) - 1)  # the first number of splitmix64 for seed 0


def seen_of(pattern: Pattern, length: int = 40, heads: int = 4) -> torch.Tensor:
    """Where each head looks (H, T, S), the future left out."""
    positions = torch.arange(length)[None]
    seen = pattern.sees(positions[..., None], positions[:, None].expand(1, length, length), heads)[0]
    return seen & torch.ones(length, length).tril().bool()


def test_patterns_show_as_many_places_as_their_closed_forms():
    last = {rule: seen_of(Pattern(rule, window=5, stride=6, block=8, summary=2))[:, -1].sum(1) for rule in
            ("strided", "fixed", "dilated", "global", "blocks")}  # fmt: skip
    assert last["strided"].tolist() == [6, 7, 6, 7]  # a stride; one of each stride of 39 tokens, and itself
    assert last["fixed"].tolist() == [8, 10, 8, 10]  # a block; two of each of five blocks, itself among them
    assert last["dilated"].tolist() == [5] * 4
    assert last["global"].tolist() == [5 + 4] * 4
    assert last["blocks"].tolist() == [8, 9, 9, 9]  # its own block; an earlier one and itself


def test_two_strided_layers_reach_every_token_and_dilation_alone_leaves_holes():
    def reach(pattern: Pattern) -> torch.Tensor:
        step = seen_of(pattern).any(0).double()
        return (step @ step > 0) | ~torch.ones(40, 40).tril().bool()

    assert reach(Pattern("strided", stride=7)).all()
    assert not reach(Pattern("dilated", window=30, dilation=2)).all()


def test_random_blocks_are_earlier_ones_and_differ_by_head_and_seed():
    first, other = (seen_of(Pattern("random", window=1, num_global=0, block=4, seed=seed)) for seed in (0, 1))
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    sizes = first.sum(2)
    assert ((sizes - 1) % 4 == 0).all()  # whole blocks, and itself
    assert sizes[:, :4].eq(1).all()


def test_one_expert_is_a_plain_feed_forward():
    experts = make(replace(PLAIN, layers=[{"channel": Experts(experts=1, top=1)}]))
    plain = make(PLAIN)
    plain.load_state_dict({
        name.replace("ff.experts.0.", "ff."): tensor
        for name, tensor in experts.state_dict().items() if "router" not in name
    })  # fmt: skip
    torch.testing.assert_close(logits(experts, tokens_of(20)), logits(plain, tokens_of(20)), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("tilt", "expected"), [(0.0, 1.0), (1e6, 4.0)])
def test_the_balance_loss_is_its_weight_for_even_use_and_as_often_as_experts_for_one_alone(tilt, expected):
    decoder = make(replace(PLAIN, num_layers=1, layers=[{"channel": Switch(experts=4, balance=0.25)}]))
    router = decoder.blocks[0].ff.router
    with torch.no_grad():
        router.weight.zero_()
        router.weight[1] = tilt * decoder.blocks[0].ff_norm.weight.sign()
        decoder.embedding.weight.abs_()  # so that expert 1 gets all tokens where it is tilted to
        decoder.blocks[0].attention.out.weight.zero_()
    decoder(torch.tensor([tokens_of(30), tokens_of(30, 1)]), decoder.new_state(batch_size=2), new_B=[30, 7])
    assert decoder.take_losses().item() == pytest.approx(0.25 * expected)


def test_a_loss_is_a_mean_over_the_pieces_of_a_pass():
    segments = make(replace(PLAIN, context_length=6, xl_length=4, layers=[{"channel": Switch(experts=3, balance=1.0)}]))
    with torch.no_grad():
        for block in segments.blocks:
            block.ff.router.weight.zero_()
    segments(torch.tensor([tokens_of(15)]), segments.new_state(training=True))
    assert segments.take_losses().item() == pytest.approx(2.0)  # one for each layer, and not for each piece
    with torch.inference_mode():
        segments(torch.tensor([tokens_of(15)]))
    assert segments.take_losses() is None


def test_a_table_of_hashes_is_balanced_and_of_its_layer():
    first, second = (
        HashExperts(experts=3, seed=2).build(replace(PLAIN, vocab_size=40), layer).table_V for layer in (0, 1)
    )
    assert sorted(first.bincount().tolist()) == [13, 13, 14]
    assert not torch.equal(first, second)


LAYERS = {
    "pattern": [{"mixer": "pattern", "rule": "random", "window": 8, "block": 4}],
    "experts": [{"channel": {"kind": "experts", "experts": 4, "top": 2, "expert_dim": 24}}],
    "sums": [{"mixer": "decay"}, {"channel": {"kind": "hash", "experts": 2}}],
    "linear": [{"mixer": "rfa", "draws": 16}, {"mixer": "performer", "features": 32}],
}


@pytest.fixture(scope="module", params=LAYERS)
def model(request, tmp_path_factory, corpus_folder):
    """A model of each kind, trained for some steps as `memlm train` does."""
    folder = tmp_path_factory.mktemp("parts") / "model"
    fields = {"model_fields": {"layers": LAYERS[request.param]}, "steps": 30, "num_layers": 2, "context_length": 64}
    report = train(Corpus([corpus_folder]), folder, TrainConfig(**{**vars(TINY), **fields}))
    assert report.losses[-1] < report.losses[0] - 0.5
    return LanguageModel(load_checkpoint(folder))


def test_drafts_batches_and_sessions_say_the_same_as_one_stream_without_them(model):
    prompt, others = "the memory of a model, the memory of a model, the memory", ["a", "some other text"]
    options = {"max_tokens": 12, "temperature": 0.0}
    plain = model.generate(prompt, drafts=0, **options).result()
    drafted = model.generate(prompt, drafts=4, draft=plain.text[:9] + "xyz", **options).result()
    assert drafted.text == plain.text
    assert drafted.finished.usage.steps < plain.finished.usage.steps
    together = model.generate_batch([others[0], prompt, others[1]], **options)
    assert together[1].text == plain.text
    with model.session() as session:
        session.append(prompt[:20])
        session.append(prompt[20:])
        assert session.generate(**options).result().text == plain.text


def test_an_adapter_of_one_row_changes_attention_around_experts_in_that_row_alone():
    decoder = make(replace(PLAIN, layers=[{"channel": Experts(experts=3)}]))
    adapter = new_adapter(LoRA(rank=2), decoder, AdapterNames(decoder).parts)
    assert not [name for name in adapter.names if ".experts." in name]
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    decoder.adapters.attach("mine", adapter, decoder)
    state = decoder.new_state(batch_size=2, adapters_B=["mine", None])
    with torch.inference_mode():
        read = decoder.logits(decoder(torch.tensor([tokens_of(12)] * 2), state)[0])
    torch.testing.assert_close(read[1], logits(decoder, tokens_of(12)), atol=1e-10, rtol=0)
    assert (read[0] - read[1]).abs().max() > 0.1
