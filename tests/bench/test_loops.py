"""What `memlm bench loops` counts, and that its command runs on a store."""

import pytest
from reports import figures_of
from typer.testing import CliRunner

from memlm.bench import loops as bench
from memlm.bench.loops import distinct_runs, right_before_wrong
from memlm.cli.app import app

pytestmark = pytest.mark.exhaustive


def test_runs_and_right_tokens_are_counted():
    assert distinct_runs([1, 1, 1, 1, 1, 1]) == 1 / 3
    assert distinct_runs([1, 2, 3, 4, 5]) == 1
    assert right_before_wrong([1, 2, 9, 4], [1, 2, 3, 4]) == 0.5
    assert right_before_wrong([1, 2], [1, 2, 3, 4]) == 0.5
    assert right_before_wrong([1, 2, 3, 4], [1, 2, 3, 4]) == 1


def test_the_command_compares_three_ways(model_folder, store_folder, corpus_folder, monkeypatch):
    monkeypatch.setattr(bench, "PROMPT_TOKENS", 20)
    monkeypatch.setattr(bench, "TOKENS", 12)
    words = ["bench", "loops", str(corpus_folder), "--model", str(model_folder), "--store", str(store_folder)]
    settings = ["--prompts", "6", "--lam", "0.9", "--k", "4", "--knn-temperature", "0.1", "--json"]
    result = CliRunner().invoke(app, [*words, *settings])
    assert result.exit_code == 0, result.output
    figures = figures_of(result.stdout)
    assert figures["memory_verbatim"] > figures["model_verbatim"]
    assert figures["guarded_distinct"] >= figures["memory_distinct"]
