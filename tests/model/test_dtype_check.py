"""Types of weights compared on a sample of text."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from memlm.cli.app import app
from memlm.model.files.checkpoint import load_checkpoint
from memlm.model.files.dtypes import check_dtypes, recommended


def test_each_type_is_compared_with_float32_on_the_same_text(model_folder):
    rows = {row["dtype"]: row for row in check_dtypes(model_folder, max_tokens=600, repeats=1)}
    assert list(rows)[:2] == ["float32", "auto"]
    assert list(rows)[-2:] == ["int8", "int4"]
    assert (rows["float32"]["ratio"], rows["float32"]["ratio_error"]) == (1, 0)
    assert rows["int4"]["bytes"] < rows["int8"]["bytes"] < rows["float32"]["bytes"]
    assert abs(rows["int8"]["ratio"] - 1) < abs(rows["int4"]["ratio"] - 1) < 0.2
    assert rows["int8"]["ratio"] == pytest.approx(rows["int8"]["perplexity"] / rows["float32"]["perplexity"])
    assert all(row["ms_per_token"] > 0 and row["tokens"] == rows["float32"]["tokens"] for row in rows.values())


def test_the_perplexity_is_that_of_the_model(model_folder, monkeypatch):
    """One window, against the loss of torch."""
    text = "The gateway keeps what it has read, and finds it again.\n"
    monkeypatch.setattr("pydoc_data.topics.topics", {"one": text})
    checkpoint = load_checkpoint(model_folder, dtype="float32")
    ids_T = torch.from_numpy(checkpoint.tokenizer.encode(text).astype("int64"))
    with torch.inference_mode():
        logits_TV = checkpoint.decoder.logits(checkpoint.decoder(ids_T[None, :-1])[0][0])
        nats = torch.nn.functional.cross_entropy(logits_TV, ids_T[1:])
    assert check_dtypes(model_folder, repeats=1)[0]["perplexity"] == pytest.approx(math.exp(nats), rel=1e-5)


def test_the_fastest_type_within_a_thousandth_is_recommended():
    rows = [
        {"dtype": "float32", "ratio": 1.0, "ms_per_token": 90.0},
        {"dtype": "auto", "ratio": 1.0009, "ms_per_token": 20.0},
        {"dtype": "int4", "ratio": 1.0011, "ms_per_token": 10.0},
    ]
    assert recommended(rows) == "auto"


def test_the_command_prints_a_table_or_one_object(model_folder):
    arguments = ["models", "check", str(model_folder), "--max-tokens", "300"]
    shown = CliRunner().invoke(app, arguments)
    assert "over float32" in shown.output
    assert "The fastest within 0.1 %" in shown.output
    printed = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert printed["recommended"] in {row["dtype"] for row in printed["dtypes"]}
