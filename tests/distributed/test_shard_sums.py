"""Shards that answer sums by value: the p_kNN of each shard's nearest entries, and errors for what needs neighbors."""

import math
import shutil
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from random_stores import DIM
from running import RunningServer
from running_shards import assert_same, cut_store, served, shard_processes, sharded

from memlm.api.params import RetrievalParams
from memlm.base.steps import run_steps
from memlm.client.client import Client
from memlm.data.corpus import Corpus as TextCorpus
from memlm.distributed.shard_messages import SegmentView, ShardAnswer, ShardSearch
from memlm.distributed.shard_server import ShardSegments, ShardServer
from memlm.distributed.shards import Shards
from memlm.errors import Incompatible, InvalidInput, NotFound
from memlm.index.neighbors import Neighbors
from memlm.index.store.datastore import Datastore
from memlm.index.store.exclusion import Exclusion, search_views
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.segment import search_segments
from memlm.index.store.shards import ShardNumber, shards_of, split
from memlm.index.store.small_segments import NewEntries
from memlm.index.value_sums import NO_ENTRY, ValueSums
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel
from memlm.model.checkpoint import load_checkpoint
from memlm.retrieval.adaptive import AdaptiveLam
from memlm.retrieval.encoder import key_after
from memlm.retrieval.interpolation import knn_logprobs, neighbor_logweights
from memlm.retrieval.loop_guard import repeating_ids, without_repeats
from memlm.retrieval.own_past import ContextSettings
from memlm.server.config import ServerConfig

QUERIES_QD = np.random.default_rng(4).normal(size=(6, DIM)).astype(np.float32) * 3
OPTIONS = {"max_tokens": 12, "temperature": 0}
ALL = 2000  # more neighbors than there are entries


def knn_of(found: Neighbors, temperature: float) -> list[dict[int, float]]:
    """p_kNN of each query, as a generation computes it."""
    logweights_QK = neighbor_logweights(found.distances_QK, temperature)
    rows = [knn_logprobs(*row) for row in zip(logweights_QK, found.values_QK, strict=True)]
    return [{} if row is None else dict(zip(row.ids_U.tolist(), np.exp(row.logprobs_U), strict=True)) for row in rows]


def slow_knn(views_Q, num_shards: int, k: int, temperature: float, gone=(), **options) -> list[dict[int, float]]:
    """p_kNN of the k values of most weight among the k nearest entries of each shard: one entry after the other."""
    logs: list[dict[int, list[float]]] = [defaultdict(list) for _ in views_Q]
    for shard in set(range(1, num_shards + 1)) - set(gone):
        segments_Q = []
        for view in views_Q:
            of = shards_of([segment.record for segment in view.segments], num_shards)
            segments_Q.append(tuple(each for each, number in zip(view.segments, of, strict=True) if number == shard))
        found = search_segments(segments_Q, views_Q[0].rounded(QUERIES_QD, k), k, **options)
        for row, column in zip(*np.nonzero(found.ids_QK >= 0), strict=True):
            logs[row][int(found.values_QK[row, column])].append(-float(found.distances_QK[row, column]) / temperature)
    results = []
    for row in logs:
        most = max((log for each in row.values() for log in each), default=0.0)
        sums = {value: math.fsum(math.exp(log - most) for log in each) for value, each in row.items()}
        kept = dict(sorted(sums.items(), key=lambda each: -each[1])[:k])
        results.append({value: total / math.fsum(kept.values()) for value, total in kept.items()})
    return results


def assert_knn(found: list[dict[int, float]], expected: list[dict[int, float]]) -> None:
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        assert row.keys() == wanted.keys()
        for value, weight in wanted.items():
            assert row[value] == pytest.approx(weight, rel=1e-4)


@pytest.mark.parametrize("index", ["Flat", "IVF4,SQfp16"])
def test_sums_are_those_over_the_neighbors_of_each_shard(tmp_path, index):
    path = cut_store(tmp_path, index)
    with Datastore.open(path) as store, sharded(path, 4) as shards:
        whole = store.snapshot
        some, none = Exclusion(["doc-3", "doc-7"]).view_of(whole), Exclusion(["*"]).view_of(whole)
        only = DocumentFilter(("doc-1*",), (("number", "10"),))
        for k, temperature in product((1, 8, ALL), (2.0, 50.0)):
            for views_Q, options in (
                ([whole] * 6, {}), ([whole, some, none] * 2, {"nprobe": 1}), ([some] * 6, {"only": only}),
            ):  # fmt: skip
                found = shards.search(views_Q, QUERIES_QD, k, temperature=temperature, **options)
                assert found.ids_QK.shape == (6, k)
                assert_knn(knn_of(found, temperature), slow_knn(views_Q, 4, k, temperature, **options))
            one, again = search_views([whole] * 6, QUERIES_QD, k), shards.search([whole] * 6, QUERIES_QD, k)
            assert_same(again, one)
            if k == ALL:  # each shard's nearest are all of its entries
                found = shards.search([whole] * 6, QUERIES_QD, k, temperature=temperature)
                assert_knn(knn_of(found, temperature), knn_of(one, temperature))


def test_a_deletion_and_an_addition_count_in_the_next_sums(tmp_path):
    path = cut_store(tmp_path)
    with Datastore.open(path) as store, sharded(path, 4) as shards:
        before = store.snapshot
        nearest = before.locate(search_views([before], QUERIES_QD[:1], 1).ids_QK[0])[0].document_id
        store.delete([nearest])
        store.remember([NewEntries("new", QUERIES_QD[:1].astype(np.float16), np.array([777]))])
        for views_Q in ([store.snapshot] * 6, [before] * 6):
            found = knn_of(shards.search(views_Q, QUERIES_QD, 8, temperature=2.0), 2.0)
            assert_knn(found, slow_knn(views_Q, 4, 8, 2.0))
            assert (777 in found[0]) == (views_Q[0] is store.snapshot)


def test_sums_of_the_shards_that_answer_tell_their_share(tmp_path):
    path = cut_store(tmp_path, num_shards=2)
    with ExitStack() as held, Datastore.open(path) as store, served(path, 1, 2) as first:
        views_Q = [store.snapshot] * 6
        second = held.enter_context(served(path, 2, 2))
        with Shards([first, second], partial=True) as shards:
            assert shards.search(views_Q, QUERIES_QD, 8, temperature=2.0).shares_Q is None
            held.close()
            found = shards.search(views_Q, QUERIES_QD, 8, temperature=2.0)
            assert_knn(knn_of(found, 2.0), slow_knn(views_Q, 2, 8, 2.0, gone=[2]))
            np.testing.assert_array_equal(found.shares_Q, shards.search(views_Q, QUERIES_QD, 8).shares_Q)
            assert 0 < found.shares_Q[0] < 1


def test_a_sum_of_weights_that_no_float_can_hold():
    distances_QK = np.array([[3.0, 4e5, 4e5, np.inf], [np.inf] * 4], np.float32)
    found = Neighbors(distances_QK, np.array([[1, 2, 3, -1], [-1] * 4]), np.array([[7, 5, 5, -1], [-1] * 4]))
    sums = ValueSums.of(found, 0.5)
    assert (sums.counts_Q.tolist(), sums.values_P.tolist()) == ([2, 0], [5, 7])
    np.testing.assert_allclose(sums.logsums_P, [-8e5 + math.log(2), -6.0], rtol=1e-6)
    merged = ValueSums.merged([sums, sums], 3, 0.5)
    assert merged.values_QK.tolist() == [[7, 5, -1], [-1, -1, -1]]
    np.testing.assert_allclose(merged.distances_QK[0, :2], [3 - math.log(2) / 2, 4e5 - math.log(4) / 2], rtol=1e-6)
    assert ValueSums.merged([sums, sums], 1, 0.5).values_QK.tolist() == [[7], [-1]]


def answer(counts=(2, 0), values=(3, 5), logsums=(0.5, -1.0)) -> bytes:
    return ShardAnswer(ValueSums(np.array(counts), np.array(values), np.array(logsums, np.float32))).encode()


def test_sums_stay_themselves_as_bytes():
    again = ShardAnswer.decode(answer()).found
    assert isinstance(again, ValueSums)
    assert (again.counts_Q.tolist(), again.values_P.tolist(), again.logsums_P.tolist()) == ([2, 0], [3, 5], [0.5, -1])
    more = answer((3, 0), (3, 5, 7), (0.5, -1.0, -2.0))
    assert len(more) - len(answer()) == 8
    assert len(answer((2, 0, 0))) - len(answer()) == 4
    queries_QD, view = np.zeros((2, 4), np.float32), ((SegmentView((1, "a")),),)
    search = ShardSearch("store", queries_QD, 2, None, view, np.zeros(2, np.int64), temperature=0.3)
    assert ShardSearch.decode(search.encode()).temperature == 0.3
    assert ShardAnswer.decode(answer()).is_of(search)
    for other in (
        ShardAnswer.decode(answer((3, 0), (3, 5, 7), (0.5, -1.0, -2.0))),  # more than k
        ShardAnswer.decode(answer((2, 0, 0))),
        ShardAnswer(Neighbors.none(2, 2)),
    ):
        assert not other.is_of(search)
    assert not ShardAnswer.decode(answer()).is_of(replace(search, temperature=None))


@pytest.mark.parametrize(
    "message",
    [
        answer()[:-1], answer()[:20], answer() + b"\0", answer((1, 0)), answer((3, -1)), answer((2, 1)),
        answer(values=(3, -5)), answer(logsums=(0.5, np.nan)), answer(logsums=(0.5, np.inf)),
        answer(logsums=(-np.inf, 0.5)),
    ],
)  # fmt: skip
def test_bytes_that_are_no_sums_are_refused(message):
    with pytest.raises(ValueError):  # noqa: PT011 - json's own among them
        ShardAnswer.decode(message)


class Earlier(ShardSegments):
    """As a shard of an earlier version would answer."""

    def search(self, search):
        return super().search(replace(search, temperature=None))


@pytest.mark.parametrize("partial", [False, True])
def test_a_shard_of_an_earlier_version_is_named_and_still_finds_neighbors(tmp_path, partial):
    path = cut_store(tmp_path, num_shards=2)
    with (
        Datastore.open(path) as store,
        ShardServer(Earlier(path, ShardNumber(1, 2)), "127.0.0.1:0") as earlier,
        served(path, 2, 2) as second,
    ):
        views_Q = [store.snapshot] * 6
        with Shards([earlier.address, second], partial=partial) as shards:
            for _ in range(2):
                with pytest.raises(Incompatible, match=f"shard 1 at {earlier.address} .* start it anew"):
                    shards.search(views_Q, QUERIES_QD, 8, temperature=2.0)
                found = shards.search(views_Q, QUERIES_QD, 8)
                assert_same(found, search_views(views_Q, QUERIES_QD, 8))
        with served(path, 1, 2) as first, Shards([earlier.address, first, second], partial=partial) as shards:
            for _ in range(4):  # whichever of the two is asked first
                assert (shards.search(views_Q, QUERIES_QD, 8, temperature=2.0).ids_QK == NO_ENTRY).any()


@pytest.fixture
def halves(tmp_path: Path, store_folder: Path) -> Path:
    """A store of a model, cut for two shards."""
    path = Path(shutil.copytree(store_folder, tmp_path / "store"))
    split(path, 2)
    return path


@contextmanager
def two_models(checkpoint, stores, path):
    """One that searches by itself, and one whose shards of a store answer sums."""
    with (
        served(path, 1, 2) as first,
        served(path, 2, 2) as second,
        LanguageModel(checkpoint, stores) as alone,
        LanguageModel(checkpoint, stores, shards=[first, second], shard_answers="sums") as lm,
    ):
        yield alone, lm


def test_a_model_with_sums_over_all_entries_is_that_of_one_process(tmp_path, model_folder, corpus_folder, halves):
    """With two datastores, of which this process searches one, and the text's own past."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    ContextSettings(k=6, temperature=20.0, lam=0.4).save(folder)
    build_index(folder, TextCorpus([corpus_folder / "doc-6.txt"]), tmp_path / "other", check="none")
    text = "the quick brown fox and the quick brown fox"
    with two_models(load_checkpoint(folder), [halves, tmp_path / "other"], halves) as (alone, lm):
        for options in ({"store": "store"}, {"stores": {"store": 1.0, "other": 3.0}, "context_cache": 0}):
            options = {**options, "k": ALL, "lam": 0.5}
            expected, found = (each.score(text, **options) for each in (alone, lm))
            assert found.nll == pytest.approx(expected.nll, rel=1e-4)
            assert found.nll != pytest.approx(lm.score(text, use_store=False).nll, rel=1e-2)
            few = {**options, "k": 4}
            assert lm.score(text, **few).nll != pytest.approx(alone.score(text, **few).nll, rel=1e-5)  # 4 of each
            expected, found = (
                each.generate(text, loop_guard=False, **options, **OPTIONS).result() for each in (alone, lm)
            )
            assert found.text == expected.text
            for one, other in zip(found.tokens, expected.tokens, strict=True):
                assert (one.logprob, one.lam) == pytest.approx((other.logprob, other.lam), abs=1e-3)


def test_a_text_with_sums_is_the_same_with_drafts_and_in_a_batch(checkpoint, halves):
    with two_models(checkpoint, [halves], halves) as (alone, lm):
        for loop_guard in (None, False):
            options = {**OPTIONS, "max_tokens": 30, "lam": 0.9, "loop_guard": loop_guard}
            plain = [lm.generate(each, drafts=0, **options).result() for each in ("the quick", "river stone")]
            assert [each.text for each in lm.generate(["the quick", "river stone"], **options)] == [
                each.text for each in plain
            ]
            for each in (alone, lm):
                drafted = each.generate("the quick", drafts=8, **options).result()
                assert each is alone or drafted.text == plain[0].text
                sources = {draft.source for draft in drafted.finished.usage.drafts}
                assert ("neighbors" in sources) == (each is alone)


def test_what_needs_neighbors_is_refused_by_name(checkpoint, halves):
    with two_models(checkpoint, [halves], halves) as (alone, lm):
        for field, options in (
            ("neighbors", {"neighbors": 1}),
            ("spalm", {"spalm": True}),
            ("knn_temperature", {"knn_temperature": 1e-13}),
            ("knn_temperature", {"knn_temperature": 1e13}),
        ):
            with pytest.raises(InvalidInput) as raised:
                lm.generate("the quick", **options, **OPTIONS).result()
            assert raised.value.field == field
        for temperature in (1e-12, 1e12):
            assert lm.generate("the quick", knn_temperature=temperature, **OPTIONS).result().text
        assert lm.generate("the quick", neighbors=1, use_store=False, **OPTIONS).result().text
        assert lm.search(None, "the quick", k=3) == alone.search(None, "the quick", k=3)


def test_a_lam_that_adapts_as_tuned_is_refused(checkpoint, halves):
    adaptive = asdict(AdaptiveLam(0.2, (-0.1, 0.2, 0.3, 0.1, 0.2), (0.0,) * 5, (1.0,) * 5))
    with Datastore.open(halves) as store:
        store.save_defaults(replace(store.manifest.defaults, adaptive=adaptive))
    with two_models(checkpoint, [halves], halves) as (_, lm):
        for ask in (lambda lm=lm: lm.score("the quick"), lambda lm=lm: lm.generate("the quick", **OPTIONS)):
            with pytest.raises(InvalidInput, match="give a lam") as raised:
                ask()
            assert raised.value.field == "lam"
        assert lm.score("the quick", lam=0.3).nll
        assert lm.generate("the quick", **OPTIONS, lam=0.3).result().text


def test_the_loop_guard_drops_the_whole_sum_of_a_token(checkpoint, halves):
    """It cannot know which of the entries the text copies."""
    ids = list(checkpoint.tokenizer.encode("the the the the the"))
    repeating = repeating_ids(ids)
    assert len(repeating)
    with two_models(checkpoint, [halves], halves) as (_, lm):
        retriever = lm.engine.stores.retriever(RetrievalParams(k=ALL, lam=0.9, knn_temperature=100.0))
        found = retriever.search(run_steps(key_after(checkpoint, "the the the the the")))
        assert set(found.neighbors.ids_QK.ravel().tolist()) == {NO_ENTRY, -1}
        repeats_K = np.isin(found.neighbors.values_QK[0], repeating)
        share = np.exp(found.logweights_QK[0, repeats_K].astype(np.float64)).sum()
        with pytest.raises(NotFound):  # and no other document in its place
            retriever.describe(found, 1)
        guarded = without_repeats(found, [ids], retriever.tokens_before)
    assert 0 < share < 1
    assert guarded.lams_Q[0] == pytest.approx(0.9 * (1 - share))
    assert not np.isin(guarded.neighbors.values_QK, repeating).any()


def test_a_server_says_what_sums_leave_out(tmp_path, model_folder, halves):
    with shard_processes(halves, tmp_path, "1/2", "2/2") as shards:
        options = [word for each in shards for word in ("--shard", each.address)]
        with (
            RunningServer(
                tmp_path / "log", model_folder, halves,
                options=(*options, "--shard-answers", "sums", "--dtype", "float32"),
            ) as server,
            Client(server.address) as client,
            LanguageModel(
                load_checkpoint(model_folder, dtype="float32"), [halves],
                shards=[each.address for each in shards], shard_answers="sums",
            ) as lm,
        ):  # fmt: skip
            expected = lm.generate("the quick", **OPTIONS).result()
            assert client.generate("the quick", **OPTIONS).result().text == expected.text
            assert client.search(None, "the quick", k=2)
            with pytest.raises(InvalidInput, match="leave neighbors out"):
                client.generate("the quick", neighbors=2, **OPTIONS).result()


def test_sums_without_shards_are_refused(model_folder, checkpoint, halves):
    for options in ({"shard_answers": "sums"}, {"shard_answers": "some", "shards": ("127.0.0.1:1",)}):
        with pytest.raises(InvalidInput) as raised:
            ServerConfig(model=model_folder, **options)
        assert raised.value.field == "shard_answers"
        with pytest.raises(InvalidInput):
            LanguageModel(checkpoint, [halves], **options)
    on_ray = ServerConfig(model=model_folder, stores=(Path("ray://name"),), shard_answers="sums", partial=True)
    assert on_ray.shard_answers == "sums"
