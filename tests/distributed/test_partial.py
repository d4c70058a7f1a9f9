"""Searches that go on without a shard: what the others have, the share told with every answer, and whole ones again."""

import json
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from random_stores import DIM, Corpus, build
from running import RunningServer, figures_of, wait_until
from running_shards import assert_same, cut_store, served, shard_processes
from typer.testing import CliRunner

from memlm.cli.app import app
from memlm.client.client import Client
from memlm.data.corpus import Corpus as TextCorpus
from memlm.distributed.shards import Shards
from memlm.errors import InvalidInput, Unavailable
from memlm.evaluation import evaluate
from memlm.index.store.datastore import Datastore
from memlm.index.store.exclusion import Exclusion, search_views
from memlm.index.store.segment import search_segments
from memlm.index.store.shards import shards_of, split
from memlm.index.store.snapshot import Snapshot
from memlm.language_model import LanguageModel

QUERIES_QD = np.random.default_rng(4).normal(size=(6, DIM)).astype(np.float32) * 3
OPTIONS = {"max_tokens": 12, "temperature": 0}


@contextmanager
def without_some(path: Path, num_shards: int, *gone: int, partial: bool = True) -> Iterator[tuple[Shards, list[str]]]:
    """Shards of a store, of which some have gone since they were greeted, and the addresses of all."""
    with ExitStack() as held, ExitStack() as going:
        addresses = [
            (going if number in gone else held).enter_context(served(path, number, num_shards))
            for number in range(1, num_shards + 1)
        ]
        shards = held.enter_context(Shards(addresses, partial=partial))
        going.close()
        yield shards, addresses


def searched_without(view: Snapshot, num_shards: int, *gone: int) -> tuple[Snapshot, float]:
    """The segments of a view that other shards have, and their share of its live entries, counted by documents."""
    of = shards_of([segment.record for segment in view.segments], num_shards)
    left = [segment for segment, shard in zip(view.segments, of, strict=True) if shard not in gone]

    def entries(segments) -> int:
        return sum(
            segment.starts[row + 1] - segment.starts[row]
            for segment in segments
            for row in range(segment.record.documents)
            if not segment.deleted_mask[row]
        )

    return tuple(left), entries(left) / entries(view.segments)


@pytest.mark.parametrize("gone", [(1,), (4,), (2, 3)])
def test_a_partial_search_finds_what_the_other_shards_have_and_tells_its_share(tmp_path, gone):
    path = cut_store(tmp_path)
    with Datastore.open(path) as store, without_some(path, 4, *gone) as (shards, _):
        whole = store.snapshot
        some = Exclusion(["doc-1*"]).view_of(whole)
        views_Q = [whole, some] * 3
        left, shares = zip(*(searched_without(view, 4, *gone) for view in (whole, some)), strict=True)
        assert 0 < shares[0] < 1
        assert shares[0] != shares[1]
        for _ in range(3):  # the first one finds out, and the others know
            found = shards.search(views_Q, QUERIES_QD, 8)
            assert_same(found, search_segments([*left] * 3, whole.rounded(QUERIES_QD, 8), 8))
            np.testing.assert_allclose(found.shares_Q, [*shares] * 3, rtol=1e-12)


def test_the_log_names_a_shard_that_is_left_out_once(tmp_path, caplog):
    path = cut_store(tmp_path, num_shards=2)
    with Datastore.open(path) as store, without_some(path, 2, 2) as (shards, addresses):
        for _ in range(20):  # over several rests of the process
            shards.search([store.snapshot], QUERIES_QD[:1], 8)
            time.sleep(0.1)
        lines = [line for line in caplog.messages if "searches go on without a shard" in line]
        assert len(lines) == 1
        assert addresses[1] in lines[0]


def test_shards_that_are_back_give_whole_results_again(tmp_path):
    path = cut_store(tmp_path, num_shards=2)
    with Datastore.open(path) as store, without_some(path, 2, 2) as (shards, addresses):
        views_Q = [store.snapshot] * 6
        assert shards.search(views_Q, QUERIES_QD, 8).shares_Q is not None
        with served(path, 2, 2, addresses[1]):
            deadline_s = time.monotonic() + 60
            while (found := shards.search(views_Q, QUERIES_QD, 8)).shares_Q is not None:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            assert_same(found, search_views(views_Q, QUERIES_QD, 8))


def test_no_shard_at_all_is_no_answer(tmp_path):
    path = cut_store(tmp_path, num_shards=2)
    with Datastore.open(path) as store, without_some(path, 2, 1, 2) as (shards, _):
        for _ in range(3):
            with pytest.raises(Unavailable, match="shard"):
                shards.search([store.snapshot], QUERIES_QD[:1], 8)
        with pytest.raises(Unavailable, match="shard"), Shards(["127.0.0.1:1"], partial=True) as none:
            none.search([store.snapshot], QUERIES_QD[:1], 8)


def test_a_shard_without_segments_is_no_answer_either(tmp_path):
    """It answers, and has nothing."""
    with (
        build(tmp_path / "small", Corpus(1, num_documents=1), "Flat") as store,
        without_some(tmp_path / "small", 2, *set(shards_of([store.snapshot.segments[0].record], 2))) as (shards, _),
        pytest.raises(Unavailable, match="shard"),
    ):
        shards.search([store.snapshot], QUERIES_QD[:1], 8)


def test_without_partial_nothing_is_left_out(tmp_path):
    path = cut_store(tmp_path, num_shards=2)
    with Datastore.open(path) as store, without_some(path, 2, 2, partial=False) as (shards, _):
        for _ in range(3):
            with pytest.raises(Unavailable, match="shard 2 at"):
                shards.search([store.snapshot], QUERIES_QD[:1], 8)


@pytest.fixture
def halves(tmp_path: Path, store_folder: Path) -> Path:
    """A store of a model, cut for two shards."""
    path = Path(shutil.copytree(store_folder, tmp_path / "store"))
    split(path, 2)
    return path


def test_a_model_tells_of_the_entries_that_it_did_not_search(tmp_path, checkpoint, halves):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox")
    with ExitStack() as held, served(halves, 1, 2) as first, LanguageModel(checkpoint, [halves]) as alone:
        second = held.enter_context(served(halves, 2, 2))
        with LanguageModel(checkpoint, [halves], shards=[first, second], partial=True) as lm:
            expected, score = alone.generate("the quick", **OPTIONS).result(), alone.score("the quick brown fox")
            assert expected.finished.usage.searched_share == score.searched_share == 1
            whole = lm.generate("the quick", **OPTIONS).result()
            assert (whole.text, whole.finished.usage.searched_share) == (expected.text, 1)
            held.close()
            with Datastore.open(halves) as store:
                _, share = searched_without(store.snapshot, 2, 2)
            texts = lm.generate(["the quick", "river stone"], **OPTIONS)
            assert [each.finished.usage.searched_share for each in texts] == [share, share]
            found = lm.score("the quick brown fox")
            assert (found.searched_share, found.nll == score.nll) == (share, False)
            for each in (
                lm.generate("the", use_store=False, **OPTIONS).result(),
                lm.generate("a", lam=0, **OPTIONS).result(),
            ):
                assert each.finished.usage.searched_share is None  # none was to be searched
            with pytest.raises(Unavailable, match=f"only {share:.1%} of the entries"):  # there is no place to tell
                lm.search(None, "the quick")
            with pytest.raises(Unavailable, match="of the entries"):
                evaluate(lm, TextCorpus([text]))
            with served(halves, 2, 2, second):
                wait_until(lambda: lm.score("the quick brown fox").searched_share == 1)
                again = lm.generate("the quick", **OPTIONS).result()
                assert [token.logprob for token in again.tokens] == [token.logprob for token in expected.tokens]
                assert lm.score("the quick brown fox").nll == score.nll


def test_a_text_that_lost_a_shard_on_its_way_tells_the_smallest_share(checkpoint, halves):
    with ExitStack() as held, served(halves, 1, 2) as first:
        second = held.enter_context(served(halves, 2, 2))
        with (
            LanguageModel(checkpoint, [halves], shards=[first, second], partial=True) as lm,
            closing(lm.generate("the quick", drafts=0, **OPTIONS)) as stream,
        ):
            next(stream)
            held.close()
            next(stream)
            with served(halves, 2, 2, second):
                wait_until(lambda: lm.score("the quick brown fox").searched_share == 1)
                assert len(list(stream)) == 10
            assert 0 < stream.finished.usage.searched_share < 1


def test_a_server_tells_everywhere_of_a_shard_that_is_down(tmp_path, model_folder, halves):
    with shard_processes(halves, tmp_path, "1/2", "2/2") as shards:
        options = [word for each in shards for word in ("--shard", each.address)]
        options += ["--partial", "--http-port", "0"]
        with (
            RunningServer(tmp_path / "server.log", model_folder, halves, options=tuple(options)) as server,
            Client(server.address) as client,
        ):

            def ask():
                return client.generate("the quick", **OPTIONS).result()

            def cli(*words: str) -> str:
                result = CliRunner().invoke(app, [*words, "--target", server.address])
                assert result.exit_code == 0, result.output
                return result.stderr

            def http(path: str, **fields: object) -> str:
                body = json.dumps({"model": model_folder.name, "max_tokens": 4, "temperature": 0, **fields})
                asked = urllib.request.Request(
                    f"{server.http_url}{path}", body.encode(), {"content-type": "application/json"}
                )
                return urllib.request.urlopen(asked, timeout=60).read().decode()

            expected = ask()
            assert expected.finished.usage.searched_share == 1
            assert "of the entries" not in cli("generate", "the quick", "--max-tokens", "4")
            assert "searched_share" not in http("/v1/completions", prompt="the quick")
            shards[1].end(signal.SIGKILL)
            share = ask().finished.usage.searched_share
            assert 0 < share < 1
            assert client.score("the quick brown fox").searched_share == share
            with pytest.raises(Unavailable, match="of the entries"):
                client.search(None, "the quick")
            for words in (("generate", "the quick", "--max-tokens", "4"), ("score", "the quick brown fox")):
                assert f"only {share:.1%} of the entries" in cli(*words)
            assert (
                f'"searched_share": {share:.3}'[:19]
                in CliRunner()
                .invoke(app, ["generate", "the quick", "--json", "--max-tokens", "2", "--target", server.address])
                .output
            )
            answer = json.loads(http("/v1/completions", prompt="the quick"))
            assert answer["usage"]["searched_share"] == answer["choices"][0]["memory"]["searched_share"] == share
            for path, fields in (
                ("/v1/completions", {"prompt": "the quick"}),
                ("/v1/completions", {"prompt": "the quick", "memory": {"neighbors": 1}}),
                ("/v1/completions", {"prompt": "the quick", "echo": True, "logprobs": 1, "max_tokens": 0}),
                (
                    "/v1/chat/completions",
                    {"messages": [{"role": "user", "content": "the quick"}], "memory": {"passages": 0}},
                ),
            ):
                last = [line for line in http(path, stream=True, **fields).splitlines() if '"finish_reason":"' in line][
                    -1
                ]
                assert json.loads(last.removeprefix("data: "))["choices"][0]["memory"]["searched_share"] == share
            store = f'memlm_datastore_partial_searches_total{{store="{halves.name}"}}'
            wait_until(lambda: figures_of(server).get(store, 0) > 12)
            shards[1].start()
            wait_until(lambda: ask().finished.usage.searched_share == 1)
            assert [each.logprob for each in ask().tokens] == [each.logprob for each in expected.tokens]
            assert "searched_share" not in http("/v1/completions", prompt="the quick", echo=True, logprobs=1)


def test_partial_without_shards_is_refused(checkpoint, halves, model_folder):
    with pytest.raises(InvalidInput, match="shards"):
        LanguageModel(checkpoint, [halves], partial=True)
    result = CliRunner().invoke(app, ["serve", "--model", str(model_folder), "--partial"])
    assert result.exit_code != 0
    assert "--partial is for shards" in f"{result.exception} {result.output}"
