"""What `memlm bench speculation` compares, on a store."""

import pytest
from reports import figures_of
from typer.testing import CliRunner

from memlm.bench import speculation as bench
from memlm.cli.app import app

pytestmark = pytest.mark.exhaustive


def test_the_command_compares_texts_with_guesses_and_without(model_folder, store_folder, corpus_folder, monkeypatch):
    for name, size in {"PROMPT_CHARACTERS": 20, "TOKENS": 16}.items():
        monkeypatch.setattr(bench, name, size)
    words = ["bench", "speculation", str(corpus_folder), "--model", str(model_folder), "--store", str(store_folder)]
    settings = ["--prompts", "2", "--delay-ms", "0", "--delay-ms", "200", "--dtype", "int8", "--repeats", "1"]
    shown = CliRunner().invoke(app, [*words, *settings])
    assert shown.exit_code == 0, shown.output
    assert "greedy" in shown.stdout
    figures = figures_of(CliRunner().invoke(app, [*words, *settings, "--json"]).stdout)
    for kind in ("greedy", "sampled"):
        for delay in ("0.0", "200.0"):
            row = f"[prompts={kind},delay_ms={delay}]"
            assert figures[f"identical{row}"] == 1
            assert figures[f"searches_per_token_none{row}"] == 1
            assert figures[f"speculation_over_none{row}"] > 0
        slow = f"[prompts={kind},delay_ms=200.0]"
        assert 0 < figures[f"accepted{slow}"] <= figures[f"drafted{slow}"]
        assert figures[f"searches_per_token_speculation{slow}"] < 0.8
        assert figures[f"speculation_over_none{slow}"] > 1
