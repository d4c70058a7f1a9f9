import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from random_stores import DEFAULTS, DIM, IVF, Corpus, fill, spec

from memlm.base.files import checksum_of
from memlm.errors import AlreadyExists, Corrupt, Incompatible, InvalidInput, Locked, NotFound
from memlm.index.store.datastore import Datastore
from memlm.index.store.lock import write_lock
from memlm.index.store.manifest import KnnDefaults
from memlm.index.store.writer import StoreWriter


def flip(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 0xFF
    path.write_bytes(raw)


def test_a_store_is_the_same_when_opened_again(make, corpus):
    store = make(corpus)
    again = Datastore.open(store.path)
    assert again.manifest == store.manifest
    assert (again.snapshot.num_entries, again.snapshot.num_documents) == (len(corpus.values_N), len(corpus.names))
    assert [document.id for document in again.snapshot.documents()] == corpus.names
    assert [document.num_tokens for document in again.snapshot.documents()] == corpus.sizes.tolist()
    assert again.snapshot.verify() == []


def test_added_documents_speak_beside_the_others(make, corpus, tmp_path):
    make(corpus).close()
    more = Corpus(2, prefix="more")
    with StoreWriter.extend(tmp_path / "store", spec()) as writer:
        fill(writer, more)
        store = writer.commit(defaults=replace(DEFAULTS, k=99))
    assert store.snapshot.num_documents == len(corpus.names) + len(more.names)
    assert store.snapshot.defaults == DEFAULTS
    for each in (corpus, more):
        found = store.search(each.keys_ND, 1)
        places = store.snapshot.locate(found.ids_QK[:, 0])
        assert [place.document_id for place in places] == [each.names[owner] for owner in each.owner_N]
        assert found.values_QK[:, 0].tolist() == each.values_N.tolist()


def test_an_id_that_is_taken_is_refused_until_it_is_deleted(make, corpus, tmp_path):
    make(corpus).close()
    with StoreWriter.extend(tmp_path / "store", spec()) as writer, pytest.raises(AlreadyExists, match="doc-0"):
        fill(writer, corpus)
    with Datastore.open(tmp_path / "store") as store:
        store.delete(["doc-0"])
    with StoreWriter.extend(tmp_path / "store", spec()) as writer:
        fill(writer, corpus, stop_after=1)
        assert writer.commit(defaults=DEFAULTS).snapshot.has_document("doc-0")


def test_two_documents_of_one_name_are_refused(tmp_path):
    with StoreWriter.create(tmp_path / "s", spec()) as writer:
        writer.begin_document("twice")
        with pytest.raises(AlreadyExists, match="twice"):
            writer.begin_document("twice")


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
@pytest.mark.parametrize("key", [np.nan, np.inf, -np.inf, 65_520, -65_520])
def test_a_key_that_float16_cannot_hold_is_refused(tmp_path, key, dtype):
    keys_ND = np.ones((3, DIM))
    with StoreWriter.create(tmp_path / "s", spec()) as writer:
        writer.begin_document("doc")
        keys_ND[1, 2] = key
        with np.errstate(over="ignore"):
            beyond_ND = keys_ND.astype(dtype)
        with pytest.raises(InvalidInput, match="not finite in float16"):
            writer.append(beyond_ND, np.arange(3))
        keys_ND[1, 2] = 65_519 * np.sign(key) if np.isfinite(key) else 0.0  # which is still rounded to 65,504
        writer.append(keys_ND.astype(dtype), np.arange(3))
        with writer.commit(defaults=DEFAULTS) as store:
            assert np.array_equal(store.snapshot.keys(store.snapshot.sample(3, 0)), keys_ND.astype(np.float16))


def test_an_entry_of_another_store_has_neither_key_nor_value(make, corpus):
    with make(corpus) as store:
        ids = store.snapshot.sample(3, 0)
        for ask in (store.snapshot.keys, store.snapshot.values):
            assert len(ask(ids)) == 3
            for strange in (0, 2, -1, (1 << 40) + len(corpus.values_N), (7 << 40) + 1):
                with pytest.raises(NotFound, match=f"no entry {strange} in"):
                    ask(np.array([*ids, strange]))


def test_deleting_what_is_not_there_deletes_nothing(make, corpus):
    store = make(corpus)
    number = store.manifest.number
    with pytest.raises(NotFound, match="nobody"):
        store.delete(["doc-1", "nobody"])
    assert store.manifest.number == Datastore.open(store.path).manifest.number == number
    assert store.snapshot.has_document("doc-1")


def test_deletions_add_up_and_stay(make, corpus):
    store = make(corpus)
    assert store.delete(["doc-1", "doc-1"]).num_documents == 1
    assert store.delete(["doc-2"]).num_entries == corpus.sizes[2]
    with Datastore.open(store.path) as again:
        assert again.snapshot.num_deleted_documents == 2
        assert not again.snapshot.has_document("doc-1")
        assert not again.snapshot.has_document("doc-2")
        assert again.snapshot.num_entries == len(corpus.values_N) - corpus.sizes[1] - corpus.sizes[2]


def test_a_reader_keeps_its_manifest_until_it_refreshes(make, corpus):
    writer = make(corpus, IVF)
    with Datastore.open(writer.path) as reader:
        before = reader.search(corpus.keys_ND[:4], 5, nprobe=4)
        writer.delete(["doc-0"])
        after = reader.search(corpus.keys_ND[:4], 5, nprobe=4)
        assert (before.ids_QK == after.ids_QK).all()
        assert reader.snapshot.locate(before.ids_QK[0])[0].document_id == "doc-0"
        assert reader.refresh()
        assert not reader.refresh()
        assert not reader.snapshot.has_document("doc-0")


def test_defaults_and_quality_are_kept(make, corpus):
    store = make(corpus)
    tuned = KnnDefaults(k=3, lam=0.5, temperature=2.5, tuned_on="some text")
    store.save_defaults(tuned)
    store.save_quality({"recall": 0.5})
    with Datastore.open(store.path) as again:
        assert again.snapshot.defaults == tuned
        assert again.manifest.quality == {"recall": 0.5}


def test_a_second_writer_is_refused_at_once(make, corpus, tmp_path):
    store = make(corpus)
    with write_lock(store.path):
        for write in (lambda: StoreWriter.extend(store.path, spec()), store.drop_keys):
            with pytest.raises(Locked, match="another process is writing"):
                write()
        store.delete(["doc-1"])  # which takes a moment: test_meanwhile.py
    with StoreWriter.create(tmp_path / "new", spec()), pytest.raises(Locked):
        StoreWriter.create(tmp_path / "new", spec())
    store.delete(["doc-0"])


def test_what_is_there_already_is_left_alone(make, corpus, tmp_path):
    store = make(corpus)
    with pytest.raises(AlreadyExists, match="index add"):
        StoreWriter.create(store.path, spec())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("precious")
    with pytest.raises(AlreadyExists, match="another folder"):
        StoreWriter.create(tmp_path / "mine", spec())
    assert (tmp_path / "mine" / "notes").read_text() == "precious"


@pytest.mark.parametrize("change", [{"dim": 13}, {"model_fingerprint": "other"}, {"tokenizer_fingerprint": "other"}])
def test_a_store_built_otherwise_is_not_extended(make, corpus, change):
    store = make(corpus)
    with pytest.raises(Incompatible, match=next(iter(change))):
        StoreWriter.extend(store.path, spec(**change))


def test_places_without_a_store_are_told_apart(tmp_path):
    with pytest.raises(NotFound, match="index build"):
        Datastore.open(tmp_path / "nowhere")
    StoreWriter.create(tmp_path / "half", spec()).close()
    with pytest.raises(NotFound, match="unfinished build"):
        Datastore.open(tmp_path / "half")


@pytest.mark.parametrize("name", ["CURRENT", "manifest-000001.json"])
def test_every_flipped_byte_of_the_small_files_is_found(make, corpus, name):
    path = make(corpus).path / name
    whole = path.read_bytes()
    for place in range(0, len(whole), 1 if len(whole) < 200 else 17):
        flip(path, place)
        with pytest.raises((Corrupt, Incompatible), match=r"CURRENT|manifest"):
            Datastore.open(path.parent)
        path.write_bytes(whole)
    Datastore.open(path.parent).close()


@pytest.mark.parametrize("name", ["keys.npy", "values.npy", "starts.npy", "documents.sqlite", "index.faiss"])
def test_truncated_missing_and_changed_files_are_found_by_name(make, corpus, name):
    path = make(corpus, IVF).path / "segments" / "000001" / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(Corrupt, match=name):
        Datastore.open(path.parents[2])
    flip_at = len(whole) // 2
    path.write_bytes(whole)
    flip(path, flip_at)
    with pytest.raises(Corrupt, match=name):
        Datastore.open(path.parents[2])
    path.unlink()
    with pytest.raises(Corrupt, match=f"{name} is missing"):
        Datastore.open(path.parents[2])


@pytest.mark.parametrize("name", ["keys.npy", "index.faiss"])
def test_verify_finds_a_flipped_byte_of_a_large_file(make, corpus, name, monkeypatch):
    monkeypatch.setattr("memlm.index.store.segment.SMALL_BYTES", 0)
    path = make(corpus, IVF).path / "segments" / "000001" / name
    flip(path, path.stat().st_size - 5)
    with Datastore.open(path.parents[2]) as store:
        (problem,) = store.snapshot.verify()
    assert name in problem
    assert "build the store anew" in problem


def test_a_newer_format_is_refused_as_such(make, corpus):
    store = make(corpus)
    path = store.path / store.manifest.name
    body = json.loads(path.read_bytes())
    body["format_version"] = 99
    del body["checksum"]
    canonical = lambda each: json.dumps(each, sort_keys=True, separators=(",", ":")).encode()  # noqa: E731
    content = canonical({**body, "checksum": checksum_of(canonical(body))})
    path.write_bytes(content)
    (store.path / "CURRENT").write_text(f"{path.name} {checksum_of(content)}\n")
    with pytest.raises(Incompatible, match="format 99"):
        Datastore.open(store.path)


def test_a_read_only_store_is_readable(make, corpus):
    store = make(corpus, IVF)
    store.close()
    (store.path / "lock").unlink(missing_ok=True)
    for folder, _, files in os.walk(store.path):
        for each in (folder, *(os.path.join(folder, file) for file in files)):
            os.chmod(each, 0o555)
    try:
        with Datastore.open(store.path) as again:
            assert again.search(corpus.keys_ND[:2], 3, nprobe=4).ids_QK.shape == (2, 3)
            assert again.snapshot.verify() == []
        assert not (store.path / "lock").exists()
    finally:
        for folder, _, _ in os.walk(store.path):
            os.chmod(folder, 0o755)
