"""Documents that hold at a time, by `valid_from` and `supersedes`: what a plain function over all of them says."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_stores import DIM, spec

from memlm.api.datastores import NewDocument
from memlm.errors import InvalidInput
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived import versions
from memlm.index.store.derived.versions import SegmentVersions, Versions, on_cycles
from memlm.index.store.exclusion import Exclusion
from memlm.index.store.filters import as_of_day, ids_of, moment_of, problems_of
from memlm.index.store.manifest import KnnDefaults
from memlm.index.store.snapshot import Snapshot
from memlm.index.store.writer import StoreWriter

DAY = "2024-03-01"
OLD, NEW, LATER = {"valid_from": "2020-01-01"}, {"valid_from": "2024-01-01"}, {"valid_from": "2025-01-01"}

Documents = Sequence[tuple[str, Mapping[str, Any]]]


def holding(documents: Documents, day: str) -> set[str]:
    """The slow twin, for days. What a document supersedes that in some steps supersedes it, does not count."""
    begun = {id_: metadata for id_, metadata in documents if metadata.get("valid_from", "0000") <= day}
    superseded = {id_: {*metadata.get("supersedes", [])} & {*begun} - {id_} for id_, metadata in begun.items()}

    def reached(id_: str) -> set[str]:
        found, waiting = set[str](), [id_]
        while waiting:
            more = superseded[waiting.pop()] - found
            found |= more
            waiting += more
        return found

    return {each for each in begun if not any(each in superseded[one] and one not in reached(each) for one in begun)}


def store_of(folder: Path, *segments: Documents) -> Datastore:
    """A store with documents of one token each, in some segments."""
    write(folder, segments[0], StoreWriter.create(folder, spec("none"), keyed=False))
    for documents in segments[1:]:
        write(folder, documents, StoreWriter.extend(folder, spec("none"), keyed=False), replace=True)
    return Datastore.open(folder)


def write(folder: Path, documents: Documents, writer: StoreWriter, **options: Any) -> None:
    with writer:
        for id_, metadata in documents:
            writer.begin_document(id_, title=id_, metadata=metadata, **options)
            writer.append(None, np.array([7]))
        writer.commit(defaults=KnnDefaults(8, 0.25, 1.0, None)).close()


def held(store: Datastore, day: str = DAY, without: Sequence[str] = ()) -> set[str]:
    return {each.id for each in Exclusion(without, day).view_of(store.snapshot).documents()}


IDS = [f"{letter}.md" for letter in "abcdefgh"]
DAYS = ["2023-01-01", "2024-01-01", "2024-06-01"]
METADATA = st.fixed_dictionaries(
    {},
    optional={
        "valid_from": st.sampled_from(DAYS),
        "supersedes": st.lists(st.sampled_from([*IDS, "gone"]), max_size=3),
    },
)
SEGMENTS = st.lists(st.dictionaries(st.sampled_from(IDS), METADATA, min_size=1), min_size=1, max_size=3)


@given(SEGMENTS, st.sets(st.sampled_from(IDS)), st.sets(st.sampled_from(IDS)), st.sampled_from([*DAYS, "2022-01-01"]))
@example([{"a.md": {}, "b.md": {"supersedes": ["a.md"]}}, {"a.md": {"supersedes": ["b.md"]}}], set(), set(), DAYS[0])
@settings(max_examples=40)
def test_those_hold_that_the_twin_says_hold(tmp_path_factory, segments, deleted, excluded, day):
    store = store_of(tmp_path_factory.mktemp("store") / "s", *(list(each.items()) for each in segments))
    whole = {id_: metadata for documents in segments for id_, metadata in documents.items()}  # later ones replace
    assert held(store, day) == holding([*whole.items()], day)
    left_out = excluded & {*whole}  # which count as deleted
    kept = [(id_, metadata) for id_, metadata in whole.items() if id_ not in left_out]
    for _ in range(2):
        assert held(store, day, sorted(left_out)) == holding(kept, day)
    store.delete(sorted(deleted & {*whole}))
    left = [(id_, metadata) for id_, metadata in whole.items() if id_ not in deleted]
    assert held(store, day) == holding(left, day)
    if left and len(segments) > 1:
        compact(store.path)
        store.refresh()
        assert held(store, day) == holding(left, day)


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ({"a": OLD, "b": NEW}, {"a", "b"}),
        ({"a": {}, "b": LATER}, {"a"}),
        ({"a": {}, "b": {"supersedes": "a"}}, {"b"}),
        ({"a": {}, "b": {"supersedes": ["a"], **LATER}}, {"a"}),
        ({"a": {}, "b": {"supersedes": "a"}, "c": {"supersedes": "b"}}, {"c"}),
        ({"a": {}, "b": {"supersedes": "a"}, "c": {"supersedes": "b", **LATER}}, {"b"}),
        ({"a": {"supersedes": "a"}}, {"a"}),
        ({"a": {"supersedes": "b"}, "b": {"supersedes": "a"}}, {"a", "b"}),
        ({"a": {"supersedes": "b"}, "b": {"supersedes": "a"}, "c": {"supersedes": ["a", "x"]}}, {"b", "c"}),
        ({"7": {}, "b": {"supersedes": [7.0]}}, {"b"}),
        ({"a": {}, "b": {"valid_from": "1 March", "supersedes": [None, True, {}]}}, {"a", "b"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",  # a set has no order
)
def test_what_supersedes_what(tmp_path, documents, expected):
    assert held(store_of(tmp_path / "s", [*documents.items()])) == expected


def test_a_superseded_document_holds_again_once_the_other_is_deleted(tmp_path):
    with store_of(tmp_path / "s", [("a", {})], [("b", {"supersedes": "a"})]) as store:
        assert held(store) == {"b"}
        store.delete(["b"])
        assert held(store) == {"a"}


@pytest.mark.parametrize(
    ("valid_from", "as_of", "holds"),
    [
        ("2024-03-01", "2024-03-01", True),
        ("2024-03-02", "2024-03-01", False),
        ("2024-03-01T23:59:59", "2024-03-01", True),  # a day counts to its end
        ("2024-03-02T00:00", "2024-03-01", False),
        ("2024-03-01", "2024-03-01T00:00", True),
        ("2024-03-01T10:00", "2024-03-01T09:59", False),
        ("2024-03-01T10:00+02:00", "2024-03-01T08:00Z", True),
        ("2024-03-01 08:00:00.000001", "2024-03-01T10:00+02:00", False),
        ("0001-01-01T00:00+14:00", "9999-12-31T23:59-14:00", True),
        ("9999-12-31", "0001-01-01", False),
        ("", "0001-01-01", True),
    ],
)
def test_a_document_holds_from_its_time_on(tmp_path, valid_from, as_of, holds):
    assert held(store_of(tmp_path / "s", [("a", {"valid_from": valid_from})]), as_of) == ({"a"} if holds else set())


@pytest.mark.parametrize(
    "text",
    [
        "", "yesterday", "2024", "2024-13-01", "2024-02-30", "20240301", "2024-W09-5", "2024-03-01T25:00",
        "٢٠٢٤-03-01", 20240301, True, "2024-03-01 " * 9,
    ],
)  # fmt: skip
def test_a_malformed_time_is_refused(text):
    with pytest.raises(InvalidInput, match=r"^as_of is .*; expected a date, as 2024-05-01, .* or today$") as refused:
        as_of_day(text)
    assert (refused.value.field, len(str(refused.value)) < 250) == ("as_of", True)


def test_today_is_the_date_of_this_computer(monkeypatch):
    days = []
    for zone in ("Etc/GMT+12", "Pacific/Kiritimati"):  # 12 hours behind UTC, and 14 ahead
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        days.append(as_of_day("today"))
    monkeypatch.undo()
    time.tzset()
    assert days[0] < days[1]
    assert moment_of("2024-03-02") - moment_of("2024-03-01") == 86_400_000_000
    assert as_of_day(None) is None


def test_a_number_that_python_does_not_write_is_no_id():
    for given_ids in (10**5000, -(10**5000), ["a", 10**5000], {"a": 10**5000}):
        assert ids_of({"supersedes": given_ids}) == ["a"] * isinstance(given_ids, list)
        with pytest.raises(InvalidInput, match="supersedes is a value with too many digits; expected the id"):
            NewDocument("x", "t", metadata={"supersedes": given_ids})
    with pytest.raises(InvalidInput, match="valid_from is a value with too many digits; expected a date"):
        NewDocument("x", "t", metadata={"valid_from": 10**5000})


@pytest.mark.parametrize("given_ids", ["a", 7, 7.0, ["a", 7], ("a",), [], "", None])
def test_ids_come_alone_or_in_a_list(given_ids):
    assert problems_of({"supersedes": given_ids}) == {}
    assert ids_of({"supersedes": given_ids}) == [str(int(each)) if isinstance(each, float) else str(each) for each in (
        given_ids if isinstance(given_ids, list | tuple) else [given_ids]) if each not in ("", None)]  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1]), max_size=25))
def test_an_edge_is_on_a_cycle_if_its_end_leads_back(pairs):
    def leads(begin: int, end: int, seen: frozenset[int] = frozenset()) -> bool:
        following = {target for source, target in pairs if source == begin} - seen
        return end in following or any(leads(each, end, seen | following) for each in following)

    sources_E, targets_E = np.array([*pairs], np.int64).reshape(-1, 2).T
    assert on_cycles(sources_E, targets_E).tolist() == [leads(target, source) for source, target in pairs]


def test_a_long_chain_and_a_long_circle_are_no_trouble():
    chain = np.arange(5000)
    assert not on_cycles(chain, chain + 1).any()
    assert on_cycles(chain, (chain + 1) % 5000).all()


def test_the_tables_are_read_once_for_all_snapshots_that_share_them(tmp_path, monkeypatch):
    store = store_of(tmp_path / "s", [("a", {}), ("x", {})], [("b", {"supersedes": "a"})])
    reads, read = [], SegmentVersions.read.__func__
    monkeypatch.setattr(
        versions.SegmentVersions, "read", classmethod(lambda cls, table: reads.append(1) or read(cls, table))
    )
    assert [held(store), held(store, "2020-01-01")] == [{"b", "x"}] * 2
    store.delete(["x"])
    assert (held(store), len(reads)) == ({"b"}, 2)
    compact(store.path)
    store.refresh()
    assert (held(store), len(reads)) == ({"b"}, 3)


def test_cycles_are_walked_along_once_for_a_snapshot_a_time_and_a_deletion(tmp_path, monkeypatch):
    ring = [(name, {"supersedes": other, **begin}) for name, other, begin in (
        ("a", "b", {}), ("b", "c", OLD), ("c", "a", LATER))]  # fmt: skip
    store = store_of(tmp_path / "s", [*ring, ("x", {})], [("y", {})])
    walks, walk = [], versions.on_cycles
    monkeypatch.setattr(versions, "on_cycles", lambda *edges: walks.append(len(edges[0])) or walk(*edges))

    def walked(expected: set[str], day: str) -> list[int]:
        walks.clear()
        for _ in range(2):
            assert held(store, day) == expected
        return walks

    assert walked({"a", "b", "c", "x", "y"}, "2026-01-01") == [3]
    assert walked({"a", "x", "y"}, DAY) == [1]
    store.delete(["x"])
    assert walked({"a", "y"}, DAY) == []
    assert walked({"a", "b", "c", "y"}, "2026-01-01") == []
    write(tmp_path / "s", [("z", {})], StoreWriter.extend(tmp_path / "s", spec("none"), keyed=False))
    store.refresh()
    assert walked({"a", "y", "z"}, DAY) == [3, 1]
    store.delete(["b"])
    assert walked({"a", "y", "z"}, DAY) == [0]


def test_circles_that_lost_equally_many_edges_are_told_apart(tmp_path):
    names = ["ab", "ba", "cd", "de", "ef", "fc"]  # each supersedes the one that its second letter begins
    ring = {name[0]: {"supersedes": name[1]} for name in names}
    with store_of(tmp_path / "s", [*ring.items()]) as store:
        assert held(store, without=["c", "d", "e", "f"]) == {"a", "b"}
        assert held(store, without=["a", "b", "c"]) == {"d"}
        assert held(store, without=["c", "d", "e", "f"]) == {"a", "b"}


def test_rows_in_segments_that_are_gone_are_forgotten(tmp_path):
    with store_of(tmp_path / "s", [("a", {"supersedes": "b"})], [("b", {})]) as store:
        assert held(store) == {"a"}
        first, second = store.snapshot.segments
        assert {*first.versions._targets_of} == {first.core, second.core}
        Versions([first])
        assert {*first.versions._targets_of} == {first.core}


def test_another_store_that_comes_to_the_path_has_versions_of_its_own(tmp_path):
    one = store_of(tmp_path / "one", [("a", {}), ("b", {"supersedes": "a"})])
    other = store_of(tmp_path / "other", [("a", {"supersedes": "b"}), ("b", {})])
    assert held(one) == {"b"}
    snapshot = Snapshot(other.path, other.manifest, one.snapshot.segments)
    assert [each.id for each in Exclusion((), DAY).view_of(snapshot).documents()] == ["a"]


def test_the_part_with_keys_has_versions_of_its_own(tmp_path):
    store_of(tmp_path / "s", [("a", {})]).close()
    with StoreWriter.extend(tmp_path / "s", spec(), keyed=True) as writer:
        writer.begin_document("b", title="b", metadata=LATER)
        writer.append(np.zeros((1, DIM), np.float32), np.array([7]))
        snapshot = writer.commit(defaults=KnnDefaults(8, 0.25, 1.0, None)).snapshot
    for part, expected in ((lambda: snapshot, ["a"]), (lambda: snapshot.keyed, [])):
        assert [each.id for each in Exclusion((), DAY).view_of(part()).documents()] == expected
