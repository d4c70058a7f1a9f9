"""Searches by shards: those of one process, to the bit, and an honest failure where a shard is gone."""

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_stores import DIM, Corpus, build
from running_shards import assert_same, cut_store, served, sharded

from memlm.distributed import shards as shards_module
from memlm.distributed.shard_messages import SEARCH, Description, SegmentView, ShardAnswer, ShardSearch
from memlm.distributed.shard_server import ShardSegments, ShardServer
from memlm.distributed.shards import Shards
from memlm.errors import Incompatible, InvalidInput, Unavailable
from memlm.index.neighbors import Neighbors
from memlm.index.store.datastore import Datastore
from memlm.index.store.exclusion import Exclusion, search_views
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.shards import ShardNumber, split
from memlm.index.store.small_segments import NewEntries
from memlm.language_model import LanguageModel

QUERIES_QD = np.random.default_rng(3).normal(size=(9, DIM)).astype(np.float32) * 3
INDEXES = ("Flat", "IVF4,SQfp16", "IVF4,SQ8")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """One store of each index."""
    return {index: cut_store(tmp_path_factory.mktemp("stores"), index) for index in INDEXES}


@pytest.mark.parametrize("index", INDEXES)
def test_shards_find_what_one_process_finds(stores, index):
    with Datastore.open(stores[index]) as store, sharded(stores[index], 4) as shards:
        whole = store.snapshot
        some = Exclusion(["doc-3", "doc-7"]).view_of(whole)
        all_gone = Exclusion(["*"]).view_of(whole)
        batches = ([whole] * 9, [some] * 9, [whole, some, all_gone] * 3, [all_gone] * 9)
        for views_Q in batches:
            for k in (1, 8, 2000):
                for nprobe in (None, 1, 4):
                    expected = search_views(views_Q, QUERIES_QD, k, nprobe=nprobe)
                    assert_same(shards.search(views_Q, QUERIES_QD, k, nprobe=nprobe), expected)
        only = DocumentFilter(("doc-1*",), (("number", "10"),))
        for chosen in (only, DocumentFilter(("nothing",))):
            assert_same(
                shards.search([some] * 9, QUERIES_QD, 8, only=chosen),
                search_views([some] * 9, QUERIES_QD, 8, only=chosen),
            )
        with pytest.raises(ValueError, match="no filter"):
            shards.search([whole, some], QUERIES_QD[:2], 8, only=only)
        assert shards.search([], QUERIES_QD[:0], 8).ids_QK.shape == (0, 8)


def test_a_deletion_and_an_addition_count_with_the_next_search(tmp_path):
    path = cut_store(tmp_path)
    with Datastore.open(path) as store, sharded(path, 4) as shards:
        before = store.snapshot
        key_1D = QUERIES_QD[:1]
        nearest = store.snapshot.locate(shards.search([before], key_1D, 1).ids_QK[0])[0].document_id
        store.delete([nearest])
        assert_same(shards.search([store.snapshot], key_1D, 20), search_views([store.snapshot], key_1D, 20))
        store.remember([NewEntries("new", key_1D.astype(np.float16), np.array([7]))])
        found = shards.search([store.snapshot], key_1D, 5)
        assert_same(found, search_views([store.snapshot], key_1D, 5))
        assert store.snapshot.locate(found.ids_QK[0, :1])[0].document_id == "new"
        assert_same(shards.search([before], key_1D, 20), search_views([before], key_1D, 20))  # as a slower server does


def test_segments_that_were_merged_away_are_still_found(tmp_path):
    path = cut_store(tmp_path)
    with Datastore.open(path) as store, Datastore.open(path) as other, sharded(path, 4) as shards:
        assert split(path, 20) > 0
        other.refresh()
        for snapshot in (store.snapshot, other.snapshot, store.snapshot):
            views_Q = [snapshot] * 9
            assert_same(shards.search(views_Q, QUERIES_QD, 8), search_views(views_Q, QUERIES_QD, 8))


def test_a_shard_opens_only_its_own_segments(tmp_path):
    path = cut_store(tmp_path)
    with Datastore.open(path) as store, sharded(path, 4) as shards:
        shards.search([store.snapshot], QUERIES_QD[:1], 8)
        segments = ShardSegments(path, ShardNumber(2, 4))
        own = segments.description.entries
        assert 0 < own < store.snapshot.num_entries / 2
        for segment in store.snapshot.segments:
            if segment.record.number not in {core[0] for core in segments._opened}:
                shutil.rmtree(path / segment.record.folder)
        assert ShardSegments(path, ShardNumber(2, 4)).description.entries == own  # on a machine with no other files


def test_a_lost_shard_fails_at_once_and_comes_back(tmp_path):
    path = cut_store(tmp_path, num_shards=2)
    with Datastore.open(path) as store, ExitStack() as held, served(path, 1, 2) as first:
        second = held.enter_context(served(path, 2, 2))
        views_Q = [store.snapshot] * 9
        expected = search_views(views_Q, QUERIES_QD, 8)
        with Shards([first, second]) as shards:
            assert_same(shards.search(views_Q, QUERIES_QD, 8), expected)
            held.close()
            begin_s = time.monotonic()
            with pytest.raises(Unavailable, match="shard 2 at"):
                shards.search(views_Q, QUERIES_QD, 8)
            assert time.monotonic() - begin_s < shards_module.TIMEOUT_S
            with served(path, 2, 2, second):
                assert_same(patiently(shards, views_Q), expected)


def patiently(shards: Shards, views_Q: list) -> Neighbors:
    """The result of a search once the shards answer again."""
    for _ in range(200):
        try:
            return shards.search(views_Q, QUERIES_QD, 8)
        except Unavailable:
            time.sleep(0.1)
    raise AssertionError("the shards do not come back")


def test_another_replica_answers_for_a_lost_one(tmp_path):
    path = cut_store(tmp_path, num_shards=2)
    with Datastore.open(path) as store, ExitStack() as held, served(path, 1, 2) as first, served(path, 2, 2) as second:
        third = held.enter_context(served(path, 2, 2))
        views_Q = [store.snapshot] * 9
        expected = search_views(views_Q, QUERIES_QD, 8)
        with Shards([first, second, third]) as shards:
            assert_same(shards.search(views_Q, QUERIES_QD, 8), expected)
            held.close()
            for _ in range(8):  # by turns with the lost one first
                assert_same(shards.search(views_Q, QUERIES_QD, 8), expected)


def test_another_replica_answers_for_one_that_hangs(tmp_path, monkeypatch):
    path, hangs = cut_store(tmp_path, num_shards=1), threading.Event()

    class Hanging(ShardSegments):
        def search(self, search):
            hangs.wait(60)
            return super().search(search)

    with (
        Datastore.open(path) as store,
        ShardServer(Hanging(path, ShardNumber(1, 1)), "127.0.0.1:0") as first,
        served(path, 1, 1) as second,
        Shards([first.address, second], timeout_s=4.0) as shards,
    ):
        views_Q = [store.snapshot] * 9
        expected = search_views(views_Q, QUERIES_QD, 8)
        for _ in range(4):  # by turns with the hanging one first
            assert_same(shards.search(views_Q, QUERIES_QD, 8), expected)
        hangs.set()
        assert any(replica.failures for replica in shards._replicas)


def test_shards_of_this_machine_are_reached_past_a_proxy(tmp_path, monkeypatch):
    path = cut_store(tmp_path, num_shards=2)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://user:secret@127.0.0.1:9")
    monkeypatch.setattr(shards_module, "FIRST_GREETING_S", 1.0)
    with Datastore.open(path) as store:
        with sharded(path, 2) as shards:
            shards.search([store.snapshot] * 9, QUERIES_QD, 8)
        with Shards(["192.0.2.1:1"]) as shards, pytest.raises(Unavailable) as caught:
            shards.search([store.snapshot] * 9, QUERIES_QD, 8)
    assert "through the proxy 127.0.0.1:9 of the variable grpc_proxy, which no_proxy=192.0.2.1" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_shard_that_is_not_there_yet_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "FIRST_GREETING_S", 3.0)
    path = cut_store(tmp_path, num_shards=2)
    with Datastore.open(path) as store, served(path, 1, 2) as first:
        views_Q = [store.snapshot] * 9
        with Shards([first, "127.0.0.1:1"]) as shards, pytest.raises(Unavailable, match=r"shard 2 of 2.*127.0.0.1:1"):
            shards.search(views_Q, QUERIES_QD, 8)
        with Shards(["127.0.0.1:1"]) as shards, pytest.raises(Unavailable, match=r"no shard answers at 127.0.0.1:1"):
            shards.search(views_Q, QUERIES_QD, 8)
        with Shards([first]) as shards, pytest.raises(Unavailable, match=r"shard 2 of 2"):
            shards.search(views_Q, QUERIES_QD, 8)
        with (
            served(path, 2, 3) as other,
            Shards([first, other]) as shards,
            pytest.raises(Unavailable, match="2 and of 3"),
        ):
            shards.search(views_Q, QUERIES_QD, 8)
    with pytest.raises(InvalidInput, match="twice"):
        Shards([first, first])


def test_a_datastore_without_shards_is_searched_here(tmp_path):
    path = cut_store(tmp_path, num_shards=2)
    with build(tmp_path / "other", Corpus(5), "Flat") as other, sharded(path, 2) as shards:
        views_Q = [other.snapshot] * 9
        assert_same(shards.search(views_Q, QUERIES_QD, 8), search_views(views_Q, QUERIES_QD, 8))


def test_a_folder_that_lags_behind_is_no_answer(tmp_path):
    path = cut_store(tmp_path, num_shards=2)
    behind = Path(shutil.copytree(path, tmp_path / "copy"))
    with Datastore.open(path) as store, sharded(behind, 2) as shards:
        store.remember([NewEntries("new", QUERIES_QD[:1].astype(np.float16), np.array([7]))])
        with pytest.raises(Unavailable, match="has no segment"):
            shards.search([store.snapshot], QUERIES_QD[:1], 8)


def test_keys_that_are_dropped_are_used_no_more(tmp_path):
    path = cut_store(tmp_path, "IVF4,SQ8", num_shards=2)
    with Datastore.open(path) as store, sharded(path, 2) as shards:
        views_Q = [store.snapshot] * 9
        before = search_views(views_Q, QUERIES_QD, 8)
        assert_same(shards.search(views_Q, QUERIES_QD, 8), before)
        store.drop_keys()
        views_Q = [store.snapshot] * 9
        expected = search_views(views_Q, QUERIES_QD, 8)
        assert not np.array_equal(expected.distances_QK, before.distances_QK)
        assert_same(shards.search(views_Q, QUERIES_QD, 8), expected)


def test_another_store_in_the_folder_is_never_taken_for_the_old_one(tmp_path):
    """Of equal documents, so that values and names say nothing of the difference."""
    path = cut_store(tmp_path, num_shards=2)
    other_docs = Corpus(1, num_documents=24)
    other_docs.keys_ND += 1
    with Datastore.open(path) as store, sharded(path, 2) as shards:
        views_Q = [store.snapshot] * 9
        assert_same(shards.search(views_Q, QUERIES_QD, 8), search_views(views_Q, QUERIES_QD, 8))
        path.rename(tmp_path / "before")
        with build(path, other_docs, "Flat") as other:
            views_Q = [other.snapshot] * 9
            expected = search_views(views_Q, QUERIES_QD, 8)
            for _ in range(100):
                assert_same(shards.search(views_Q, QUERIES_QD, 8), expected)  # here, and then by the shards
                if {of.description.store_id for of in shards._replicas} == {other.manifest.store_id}:
                    break
                time.sleep(0.2)
            assert_same(shards.search(views_Q, QUERIES_QD, 8), expected)


def test_more_exclusions_than_a_shard_keeps(tmp_path, monkeypatch):
    monkeypatch.setattr("memlm.distributed.shard_server.KEPT_VIEWS", 4)
    path = cut_store(tmp_path, num_shards=2)
    with Datastore.open(path) as store, sharded(path, 2) as shards:
        views_Q = [Exclusion([f"doc-{number}"]).view_of(store.snapshot) for number in range(9)]
        for _ in range(3):
            assert_same(shards.search(views_Q, QUERIES_QD, 8), search_views(views_Q, QUERIES_QD, 8))


def test_many_threads_may_search(tmp_path):
    path = cut_store(tmp_path, num_shards=2)
    with Datastore.open(path) as store, sharded(path, 2) as shards, ThreadPoolExecutor(8) as pool:
        views = [[Exclusion([f"doc-{number % 5}"]).view_of(store.snapshot)] * 9 for number in range(40)]
        found = list(pool.map(lambda views_Q: shards.search(views_Q, QUERIES_QD, 8), views))
        for views_Q, each in zip(views, found, strict=True):
            assert_same(each, search_views(views_Q, QUERIES_QD, 8))


def test_a_folder_that_is_moved_away_ends_no_search(tmp_path):
    path = cut_store(tmp_path, num_shards=2)
    with Datastore.open(path) as store, sharded(path, 2) as shards:
        views_Q = [store.snapshot] * 9
        expected = search_views(views_Q, QUERIES_QD, 8)
        path.rename(tmp_path / "elsewhere")
        for replica in shards._replicas:
            replica.describe()
            assert replica.reachable
        assert_same(shards.search(views_Q, QUERIES_QD, 8), expected)


def test_stores_that_no_shard_can_serve_are_refused(tmp_path):
    build(tmp_path / "drafts", Corpus(1), "none").close()
    with pytest.raises(Incompatible, match="has no keys"):
        ShardSegments(tmp_path / "drafts", ShardNumber(1, 2))
    with served(cut_store(tmp_path), 1, 2) as address, pytest.raises(Unavailable, match="cannot be listened on"):
        ShardServer(ShardSegments(tmp_path / "store", ShardNumber(2, 2)), address)


@given(
    st.integers(0, 3), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 99)),
    st.dictionaries(st.text("0123456789abcdef", min_size=4, max_size=4), st.binary(max_size=9), max_size=3),
    st.one_of(st.none(), st.just(DocumentFilter(("a", "b*"), (("field", "é"),)))),
)  # fmt: skip
def test_a_search_stays_itself_as_bytes(num_queries, k, nprobe, masks, only):
    queries_QD = np.random.default_rng(0).normal(size=(num_queries, 4)).astype(np.float16).astype(np.float32)
    views = ((SegmentView((1, "a")), SegmentView((2, "c"), "ff")), ())
    search = ShardSearch("store", queries_QD, k, nprobe, views, np.arange(num_queries) % 2, only, masks)
    again = ShardSearch.decode(search.encode())
    np.testing.assert_array_equal(again.queries_QD, queries_QD)
    np.testing.assert_array_equal(again.view_Q, search.view_Q)
    assert (again.k, again.nprobe, again.views, again.only, again.masks) == (k, nprobe, views, only, masks)


def test_an_answer_stays_itself_as_bytes():
    found = Neighbors(np.array([[0.5, np.inf]], np.float32), np.array([[5 << 40, -1]]), np.array([[(1 << 24) - 1, -1]]))
    again = ShardAnswer.decode(ShardAnswer(found).encode())
    assert again.found is not None
    assert_same(again.found, found)
    assert ShardAnswer.decode(ShardAnswer(None, ("ab", "cd")).encode()).missing == ("ab", "cd")
    described = Description("store", 1, 2, "process", 10)
    assert Description.decode(described.encode()) == described


@pytest.mark.parametrize("cut", [0, 3, 20, -1])
def test_bytes_that_are_no_message_are_refused(cut):
    search = ShardSearch("store", QUERIES_QD, 8, None, ((SegmentView((1, "a")),),), np.zeros(9, np.int64)).encode()
    answer = ShardAnswer(Neighbors.none(9, 8)).encode()
    for kind, message in ((ShardSearch, search), (ShardAnswer, answer)):
        with pytest.raises(ValueError):  # noqa: PT011 - json's own among them
            kind.decode(message[:cut])


def test_a_shard_survives_bytes_that_are_no_search(tmp_path):
    path = cut_store(tmp_path, num_shards=2)
    wrong = ShardSearch("store", QUERIES_QD, 0, None, ((),), np.zeros(9, np.int64))
    named = ShardSearch(
        "store", QUERIES_QD, 8, None, ((SegmentView((1, "a"), "00"),),), np.zeros(9, np.int64), None, {"00": b"x"}
    )
    with served(path, 1, 2) as address, grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(SEARCH)
        for message in (b"", b"\xff" * 99, wrong.encode(), named.encode()):
            with pytest.raises(grpc.RpcError) as raised:
                call(message, timeout=10)
            assert raised.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
        with Datastore.open(path) as store, served(path, 2, 2) as second, Shards([address, second]) as shards:
            views_Q = [store.snapshot] * 9
            assert_same(shards.search(views_Q, QUERIES_QD, 8), search_views(views_Q, QUERIES_QD, 8))


def test_a_model_generates_the_same_with_shards(tmp_path, checkpoint, store_folder):
    path = Path(shutil.copytree(store_folder, tmp_path / "store"))
    split(path, 3)
    options = {"max_tokens": 12, "top_k": 1}
    with LanguageModel(checkpoint, [path]) as alone, ExitStack() as held:
        addresses = [held.enter_context(served(path, number, 3)) for number in (1, 2, 3)]
        with LanguageModel(checkpoint, [path], shards=addresses) as sharded_lm:
            for prompt in ("the quick", "a", "river stone"):
                expected, found = (
                    alone.generate(prompt, **options).result(),
                    sharded_lm.generate(prompt, **options).result(),
                )
                assert found.text == expected.text
                assert [token.logprob for token in found.tokens] == [token.logprob for token in expected.tokens]
            held.close()
            with pytest.raises(Unavailable, match="does not answer"):
                sharded_lm.generate("the quick", **options).result()
            assert sharded_lm.generate("the quick", use_store=False, **options).result().text
