"""The bench of shards, at the smallest sizes: real processes, real figures."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import shards
from benchmarks.commands import app
from memlm.base.progress import silent
from memlm.language_model import LanguageModel
from memlm.model.checkpoint import load_checkpoint


def test_the_bench_of_shards(monkeypatch: pytest.MonkeyPatch, model_folder: Path, store_folder: Path) -> None:
    monkeypatch.setattr(shards, "HOPS", 5)
    monkeypatch.setattr(shards, "TOKENS", 12)
    figures = shards.bench_shards(model_folder, store_folder, shards=2, repeats=1, dtype="float32", progress=silent)
    assert figures["identical"]
    assert figures["segments"] == 2
    assert [row["way"] for row in figures["rows"]] == ["no drafts", "drafts"]
    for row in figures["rows"]:
        assert row["sharded_over_alone"] == pytest.approx(row["ms_per_token_sharded"] / row["ms_per_token"])
    for hop in figures["hops"].values():
        assert 0 < hop["p50_ms"] <= hop["p99_ms"]


def test_the_bench_compares_the_answers_of_shards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_folder: Path, store_folder: Path
) -> None:
    for name, value in (("HOPS", 2), ("TOKENS", 8), ("ANSWER_KS", (4, 2000))):
        monkeypatch.setattr(shards, name, value)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog")
    command = ["shards", str(store_folder), "--model", str(model_folder), "--shards", "2", "--repeats", "1"]
    result = CliRunner().invoke(app, [*command, "--dtype", "float32", "--text", str(text), "--json"])
    assert result.exit_code == 0, result.output
    few, sums_of_few, all_found, sums_of_all = json.loads(result.stdout)["settings"]["answers"]
    assert [few["k"], few["answers"], sums_of_all["k"], sums_of_all["answers"]] == [4, "neighbors", 2000, "sums"]
    with LanguageModel(load_checkpoint(model_folder, dtype="float32"), [store_folder]) as lm:
        defaults = lm.engine.stores.model_store().snapshot.defaults
        score = lm.score(text.read_text(), k=4, lam=defaults.lam, knn_temperature=defaults.temperature)
    assert few["nats"] == pytest.approx(score.nll / score.tokens)
    assert few["nats"] != pytest.approx(sums_of_few["nats"])  # over more neighbors
    assert all_found["nats"] == pytest.approx(sums_of_all["nats"], rel=1e-4)
    assert 16 * 4 < few["bytes"] < 16 * 4 + 8  # a header for some queries
    assert all_found["bytes"] - few["bytes"] == pytest.approx(16 * 1996, abs=1)
    assert 8 < sums_of_few["bytes"] < 8 * 4 + 4 + 8
    assert all(row["search_p50_ms"] > 0 for row in (few, sums_of_few))


def test_the_command_prints_the_ratios(monkeypatch: pytest.MonkeyPatch, model_folder: Path, store_folder: Path) -> None:
    monkeypatch.setattr(shards, "HOPS", 2)
    monkeypatch.setattr(shards, "TOKENS", 8)
    command = ["shards", str(store_folder), "--model", str(model_folder), "--shards", "2", "--repeats", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "no drafts" in result.output
    assert "one hop by unix, 8 queries" in result.output
    assert "the same texts" in result.output
