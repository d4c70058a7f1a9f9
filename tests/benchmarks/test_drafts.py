"""What `python -m benchmarks drafts` compares, on a store."""

import pytest
from reports import figures_of
from typer.testing import CliRunner

from benchmarks import drafts as bench
from benchmarks.commands import app

pytestmark = pytest.mark.exhaustive


def test_the_command_compares_texts_with_drafts_and_without(model_folder, store_folder, corpus_folder, monkeypatch):
    sizes = {"PROMPT_CHARACTERS": 20, "TOKENS": 12, "COPIED_CHARACTERS": 20, "STARTED_CHARACTERS": 5}
    for name, size in sizes.items():
        monkeypatch.setattr(bench, name, size)
    words = ["drafts", str(corpus_folder), "--model", str(model_folder), "--store", str(store_folder)]
    settings = ["--prompts", "4", "--streams", "1", "--streams", "2", "--dtype", "int8", "--repeats", "1"]
    shown = CliRunner().invoke(app, [*words, *settings])
    assert shown.exit_code == 0, shown.output
    assert "greedy" in shown.stdout
    more = CliRunner().invoke(app, [*words, *settings, "--streams", "5"])
    assert "4 texts of over 40 characters as prompts, and 5 streams" in str(more.exception)
    result = CliRunner().invoke(app, [*words, *settings, "--json"])
    figures = figures_of(result.stdout)
    kinds = ("in domain, greedy", "in domain, sampled", "repeated, greedy", "no match")
    for words in (f"[prompts={kind},streams={streams}]" for kind in kinds for streams in (1, 2)):
        assert figures[f"identical{words}"] == 1
        assert figures[f"tokens_a_step{words}"] >= 1
        assert figures[f"drafts_over_none{words}"] > 0
    assert any(name.startswith("accepted_from_") for name in figures)
    words = "[prompts=in domain, greedy,streams=2]"
    places = {name: value for name, value in figures.items() if "_at_" in name and name.endswith(words)}
    assert any(name.startswith("tried_from_text_at_1") for name in places)
    for name, taken in places.items():
        assert not name.startswith("taken") or 0 < taken <= places[name.replace("taken", "tried")]
