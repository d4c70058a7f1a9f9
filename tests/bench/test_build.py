"""The bench of a build reads what it was given, and as much of it as was asked for."""

import pytest
from reports import figures_of

from memlm.bench.build import bench_build
from memlm.cli import main
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput

pytestmark = pytest.mark.exhaustive


def test_it_builds_from_the_first_documents_that_have_so_many_tokens(model_folder, corpus_folder, checkpoint):
    sizes = [len(checkpoint.tokenizer.encode(document.text)) for document in Corpus([corpus_folder])]
    for entries, documents in ((sizes[0] + 1, 2), (sizes[0], 1), (None, len(sizes))):
        figures = bench_build(model_folder, Corpus([corpus_folder]), entries=entries, repeats=1)
        assert figures["entries"] == sum(sizes[:documents])
    for bare in ("forward", "reading"):
        ratio = figures["build_tokens_per_s"] / figures[f"{bare}_tokens_per_s"]
        assert figures[f"build_over_{bare}"] == pytest.approx(ratio)


def test_it_refuses_more_than_there_is(model_folder, corpus_folder):
    with pytest.raises(InvalidInput, match="give more text"):
        bench_build(model_folder, Corpus([corpus_folder]), entries=10**9, repeats=1)


def test_the_command_tells_what_it_measured(model_folder, corpus_folder, capsys, monkeypatch):
    command = ["memlm", "bench", "build", str(corpus_folder), "--model", str(model_folder), "--repeats", "1", "--json"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (None, 0)
    assert figures_of(capsys.readouterr().out)["build_over_forward"] > 0


def test_entries_want_texts(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["memlm", "bench", "build", "--entries", "3"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert "give TEXT" in capsys.readouterr().err
