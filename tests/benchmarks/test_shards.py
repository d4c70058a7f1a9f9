"""The bench of shards, at the smallest sizes: real processes, real figures."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import shards
from benchmarks.commands import app
from memlm.base.progress import silent


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


def test_the_command_prints_the_ratios(monkeypatch: pytest.MonkeyPatch, model_folder: Path, store_folder: Path) -> None:
    monkeypatch.setattr(shards, "HOPS", 2)
    monkeypatch.setattr(shards, "TOKENS", 8)
    command = ["shards", str(store_folder), "--model", str(model_folder), "--shards", "2", "--repeats", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "no drafts" in result.output
    assert "one hop by unix, 8 queries" in result.output
    assert "the same texts" in result.output
