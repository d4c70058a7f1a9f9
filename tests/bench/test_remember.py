"""What the bench of remembered texts measures."""

import pytest
from reports import figures_of
from typer.testing import CliRunner

from memlm.bench.remember import bench_remember
from memlm.cli.app import app
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput


def test_the_command_tells_the_time_over_the_prefill(model_folder, corpus_folder):
    words = ["bench", "remember", str(corpus_folder), "--model", str(model_folder), "--tokens", "40", "--repeats", "2"]
    ran = CliRunner().invoke(app, [*words, "--json"])
    assert ran.exit_code == 0, ran.output
    figures = figures_of(ran.stdout)
    assert figures["tokens"] == 40
    assert figures["over_prefill"] > 0
    assert figures["slowest_remember_s"] >= figures["remember_s"] > 0
    assert figures["segments"] < 1 + 4  # four remembered texts have merged


def test_it_refuses_texts_that_are_too_short(checkpoint, corpus_folder, tmp_path):
    with pytest.raises(InvalidInput, match="this needs 2,016; give more"):
        bench_remember(
            checkpoint, Corpus([corpus_folder / "doc-1.txt", corpus_folder / "doc-2.txt"]), tmp_path, repeats=2
        )
