"""The table of variants: equal parameters, states that are filled to a length, and the command."""

import json
import math

import pytest
import torch
from texts import make_text
from typer.testing import CliRunner

from memlm.bench import variants
from memlm.bench.filled import READ, STEPS, decode_speed, filled_state, room_for
from memlm.bench.variants import PLAIN, SHAPE, VARIANTS, active_parameters, chosen_variants, plan, solve_ff, variant
from memlm.cli.app import app
from memlm.data.corpus import Document
from memlm.errors import InvalidInput
from memlm.model import Decoder, ModelConfig
from memlm.model.state_size import row_bytes

VOCAB = 300
PLAIN_CONFIG = ModelConfig.from_dict({**SHAPE, "vocab_size": VOCAB})


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_the_plain_model_s_parameters_and_decodes_behind_a_filled_state(name):
    config, count = variant(VARIANTS[name], VOCAB), active_parameters(Decoder(PLAIN_CONFIG))
    torch.manual_seed(0)
    decoder = Decoder(room_for(config, 700)).eval()
    assert abs(active_parameters(decoder) / count - 1) < 0.02
    state = filled_state(decoder, 700)
    assert state.num_bytes > 0
    assert decode_speed(decoder, state, 0.05) > 0
    with torch.inference_mode():
        assert torch.isfinite(decoder(torch.ones(1, 1, dtype=torch.int64), state)[0]).all()


def test_a_filled_state_has_the_bytes_of_one_that_was_read():
    for patch in ({}, {"windows": (64,) * 4}, VARIANTS["memorizing"]):
        config = room_for(variant(patch, VOCAB), 600)
        decoder = Decoder(config).eval()
        assert filled_state(decoder, 600).length == (
            600 if not config.is_windowed else filled_state(decoder, 600).length
        )
        read = decoder.new_state(capacity=600 + READ + STEPS)
        with torch.inference_mode():
            decoder(torch.ones(1, 600, dtype=torch.int64), read)
        assert filled_state(decoder, 600).num_bytes == pytest.approx(read.num_bytes, rel=0.1)
        if not patch:
            assert row_bytes(config, 600 + READ + STEPS, torch.float32) == read.num_bytes


def test_experts_count_where_a_token_meets_them():
    plain, switch = (active_parameters(Decoder(variant(VARIANTS[name], VOCAB))) for name in (PLAIN, "switch"))
    assert Decoder(variant(VARIANTS["switch"], VOCAB)).num_parameters > 1.5 * switch
    assert switch == pytest.approx(plain, rel=0.02)


def test_a_width_that_would_be_negative_is_refused():
    with pytest.raises(InvalidInput, match="more than 1,000 parameters"):
        solve_ff(PLAIN_CONFIG, 1000)


def test_plain_runs_are_first_in_the_middle_and_last():
    assert plan(["a", "b", "c"]) == ["plain", "a", "plain again", "b", "c", "plain at last"]
    assert chosen_variants(["xl", "window"]) == ["window", "xl"]
    with pytest.raises(InvalidInput, match=r"'nothing' is no variant; .*window"):
        chosen_variants(["nothing"])


def test_held_out_documents_are_no_others(tmp_path):
    documents = [Document(str(number), f"text {number}") for number in range(30)]
    held, left = variants.held_out_of(documents)
    assert [document.id for document in held] == ["5", "15", "25"]
    assert len(left) == 27
    with pytest.raises(InvalidInput, match="six at least"):
        variants.held_out_of(documents[:5])


@pytest.fixture
def corpus(tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(make_text(number, 3000))
    return tmp_path


def test_the_command_prints_a_row_a_variant_and_the_spread_of_plain_runs(corpus, monkeypatch, tmp_path_factory):
    monkeypatch.setattr(variants, "SIZES", (100, 200, 300))
    monkeypatch.setitem(variants.SHAPE, "dim", 32)
    monkeypatch.setitem(variants.SHAPE, "context_length", 64)
    target = tmp_path_factory.mktemp("out") / "table.md"
    command = [
        "bench",
        "variants",
        str(corpus),
        "--minutes",
        "0.05",
        "--only",
        "hash,xl",
        "--json",
        "--out",
        str(target),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    values = {each["metric"]: each["value"] for each in report["results"]}
    for name in ("plain", "plain again", "plain at last", "hash", "xl"):
        assert 0 < values[f"bits_a_byte[way={name}]"] < 10
        assert values[f"train_tokens_per_s[way={name}]"] > 0
    assert values["decode_tokens_per_s_at_300[way=xl]"] > 0
    assert all(value is not None and math.isfinite(value) for value in values.values())
    assert values["spread_of_plain"] >= 0
    lines = target.read_text().splitlines()
    assert [line.split(" | ")[0].strip("| *") for line in lines[:7]] == [
        "variant", "---", "plain", "xl", "plain again", "hash", "plain at last"
    ]  # fmt: skip


def test_options_of_the_table_are_refused_beside_effects():
    result = CliRunner().invoke(app, ["bench", "variants", "--effects", "--out", "table.md"])
    assert isinstance(result.exception, InvalidInput)


def test_a_variant_that_fails_leaves_the_others(corpus, monkeypatch):
    curve = variants.Curve(1000, 10.0, 0.0, {}, 2.0)

    def measure(name, texts, seconds, marks):
        if name == "xl":
            raise RuntimeError("out of memory")
        return {"way": name, "bits_a_byte": 2.0 + 0.1 * len(name)}, curve

    monkeypatch.setattr(variants, "measure", measure)
    figures = variants.bench_variants(
        variants.Corpus([corpus]), minutes=1, only=["xl", "hash"], device="cpu", progress=lambda *_: None
    )
    assert figures["errors"] == {"xl": "RuntimeError: out of memory"}
    assert [row["way"] for row in figures["rows"]] == ["plain", "plain again", "hash", "plain at last"]
    assert figures["spread_of_plain"] == pytest.approx(0.8)
    assert figures["marks"] == [250, 500]
