"""What `python -m benchmarks retrieval` tells, held against what the library itself does."""

import shutil

import pytest
from typer.testing import CliRunner

from benchmarks.commands import app
from benchmarks.retrieval import bench_retrieval
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.evaluation import evaluate
from memlm.indexing.build import build_index
from memlm.language_model import load

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def told(model_folder, corpus_folder, tmp_path_factory):
    """Figures of a store and of a pruned one; seven documents in the store, two held-out texts."""
    folder = tmp_path_factory.mktemp("bench")
    texts = Corpus([corpus_folder / f"doc-{number}.txt" for number in range(6)])
    build_index(model_folder, texts, folder / "whole")
    build_index(model_folder, texts, folder / "pruned", prune=0.0033)
    figures = bench_retrieval(
        model_folder, [folder / "whole", folder / "pruned"], Corpus([corpus_folder / "doc-6.txt"]),
        Corpus([corpus_folder / "doc-7.txt"]), repeats=2,
    )  # fmt: skip
    return folder, figures


def test_the_first_way_is_one_lam_and_nothing_else(told, model_folder, corpus_folder):
    folder, figures = told
    first = figures["rows"][0]
    assert (first["store"], first["way"], first["gain"], first["time_over_one_lam"]) == ("whole", "one lam", 0.0, 1.0)
    with load(model_folder, [folder / "whole"]) as lm:
        defaults = lm.engine.stores.model_store().snapshot.defaults
        memory = {"k": defaults.k, "lam": defaults.lam, "knn_temperature": defaults.temperature}
        total = evaluate(lm, Corpus([corpus_folder / "doc-7.txt"]), **memory).total
    assert first["nats"] == pytest.approx(total.nll / total.tokens, rel=1e-5)
    assert figures["tokens"] == total.tokens
    assert figures["model_nats"] == pytest.approx(total.base.nll / total.tokens, rel=1e-5)


def test_every_way_says_what_it_gains_and_what_it_costs(told):
    _, figures = told
    rows = figures["rows"]
    assert [row["pruned"] > 0 for row in rows] == [row["store"] == "pruned" for row in rows]
    for row in rows:
        assert row["gain"] == pytest.approx(rows[0]["nats"] - row["nats"], abs=1e-9)
        assert row["gain_error"] >= 0
        assert row["ms_per_token"] > 0


def test_nothing_to_judge_by_is_refused(told, model_folder, corpus_folder, tmp_path):
    folder, _ = told
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InvalidInput):
        bench_retrieval(
            model_folder, [folder / "whole"], Corpus([corpus_folder / "doc-6.txt"]), Corpus([tmp_path / "empty.txt"])
        )


def test_the_command_shows_a_table(told, model_folder, corpus_folder, tmp_path):
    folder, _ = told
    store = shutil.copytree(folder / "whole", tmp_path / "store")
    command = ["retrieval", str(corpus_folder / "doc-7.txt"), "--tune", str(corpus_folder / "doc-6.txt")]
    done = CliRunner().invoke(app, [*command, "-m", str(model_folder), "-s", str(store), "--repeats", "1"])
    assert done.exit_code == 0, done.output
    assert "one lam" in done.output
