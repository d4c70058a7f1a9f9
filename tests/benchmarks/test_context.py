"""What `python -m benchmarks context` tells of documents that repeat themselves, and of their lengths."""

import pytest
from reports import figures_of
from texts import make_text
from typer.testing import CliRunner

from benchmarks import context as bench
from benchmarks.commands import app
from memlm.bench import texts
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput

pytestmark = pytest.mark.exhaustive


def test_the_command_tells_gains_and_times(model_folder, store_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "SIZES", (100, 9000))
    monkeypatch.setattr(texts, "TOKENS", 20)  # the model's context is short
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"{make_text(number, 12)} " * 8)
    command = ["context", str(tmp_path), "--model", str(model_folder), "--store", str(store_folder)]
    result = CliRunner().invoke(app, [*command, "--window", "40", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    figures = figures_of(result.stdout)
    assert figures["documents"] == 5
    assert figures["nats_less_context_cache"] > 0.3
    assert figures["nats_less_both"] > figures["nats_less_datastore"]
    assert 1 < figures["time_a_token_100_over_none"] < 1 + 3 * figures["search_ms_9000"] / figures["token_ms"]
    with pytest.raises(InvalidInput, match="8 of held-out text"):
        bench.bench_context(
            model_folder, Corpus([tmp_path], "[0-3].txt"), None, window=40, repeats=1, progress=lambda *_: None
        )
