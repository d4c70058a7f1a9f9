"""Texts that a datastore has more than once: the model reads each once, and the store is as if it had read all."""

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import make_text

from memlm.data.corpus import Document
from memlm.data.windows import Window
from memlm.index.store.datastore import Datastore
from memlm.index.store.snapshot import Snapshot
from memlm.indexing import estimate
from memlm.indexing import keys as indexing_keys
from memlm.indexing.build import add_to_index, build_index, compact_index, index_keys
from memlm.indexing.encoding import LocalEncoder
from memlm.language_model import load
from memlm.model.files.checkpoint import Checkpoint

TEXTS = [make_text(seed, words) for seed, words in ((0, 1), (1, 3), (2, 3), (3, 60), (4, 90))]


class Counting(LocalEncoder):
    """An encoder that counts the documents that it begins to read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.decoder)
        self.start_id, self.num_documents = checkpoint.tokenizer.start_id, 0

    def encode(self, blocks, prune, on_window):
        def counted() -> Iterator[Sequence[Window]]:
            for block in blocks:
                self.num_documents += sum(each.inputs_T[0] == self.start_id for each in block)
                yield block

        return super().encode(counted(), prune, on_window)


@contextmanager
def small(**changed: object) -> Iterator[None]:
    """Small blocks and pieces, or all texts read."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(indexing_keys, "CHECKPOINT_WINDOWS", 2)
        patched.setattr(indexing_keys, "PIECE_TOKENS", 100)
        for name, value in changed.items():
            patched.setattr(indexing_keys, name, value)
        yield


def all_read(texts, segments) -> list[None]:
    """The slow twin: no text is known."""
    return [None] * len(texts)


def documents(prefix: str, numbers: list[int]) -> list[Document]:
    return [Document(f"{prefix}-{place}", TEXTS[number]) for place, number in enumerate(numbers)]


def digests_of(store: Path) -> list[tuple[str, str]]:
    """What the files of a store's segments hold. All reads of two stores with the same are equal."""
    return [
        (path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted((store / "segments").rglob("*"))
        if path.suffix in (".npy", ".bin", ".faiss")
    ]


def ids_of(snapshot: Snapshot) -> list[str]:
    return [document.id for document in snapshot.documents()]


NUMBERS = st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=8)


@settings(max_examples=8, deadline=None)
@given(NUMBERS, NUMBERS, st.sets(st.integers(0, 7)), st.sampled_from([None, 0.2]), st.booleans())
def test_a_store_of_equal_texts_is_the_one_of_which_the_model_read_every_text(
    model_folder, first, second, deleted, prune, is_purged
):
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for name, changed in (("fast", {}), ("slow", {"sources_of": all_read})):
            store = Path(folder) / name
            with small(**changed):
                build_index(model_folder, documents("a", first), store, keys="now", prune=prune, check="none")
                with Datastore.open(store) as opened:
                    opened.delete([f"a-{each}" for each in sorted(deleted) if each < len(first)])
                add_to_index(model_folder, documents("b", second), store, keys="now", check="none")
                compact_index(store, purge=is_purged)
                with Datastore.open(store) as opened:
                    assert opened.snapshot.verify() == []
                    found.append((digests_of(store), ids_of(opened.snapshot)))
        assert found[0] == found[1]
        assert len(found[0][0]) > 3


def test_each_text_is_read_once_in_pieces_additions_and_moves(model_folder, checkpoint, tmp_path):
    encoder = Counting(checkpoint)
    options = {"keys": "now", "check": "none", "encoder": encoder}
    with small():
        build_index(model_folder, documents("a", [3, 4, 3, 3, 4, 0]), tmp_path / "s", **options)
        assert encoder.num_documents == 3
        add_to_index(model_folder, documents("b", [0, 1, 4, 1]), tmp_path / "s", **options)
        assert encoder.num_documents == 4
        with Datastore.open(tmp_path / "s") as store:  # as where a folder is moved
            store.delete(["a-1", "a-4", "b-2"])
        add_to_index(model_folder, documents("c", [4, 2]), tmp_path / "s", **options)
        assert encoder.num_documents == 5


def test_killed_keys_of_equal_texts_go_on(model_folder, tmp_path):
    given_documents = documents("a", [3, 3, 3, 3, 0, 1, 3, 2, 4, 4, 2])
    with small(PIECE_TOKENS=1 << 20):
        build_index(model_folder, given_documents, tmp_path / "whole", keys="now", check="none")
        for most in (5, 16, 20):
            cut, calls = tmp_path / str(most), iter(range(most))
            build_index(model_folder, given_documents, cut, keys="none")

            def kill(phase: str, done: int, total: int | None, note: str = "", calls: Iterator[int] = calls) -> None:
                if phase == "make keys" and next(calls, None) is None:
                    raise InterruptedError

            with pytest.raises(InterruptedError):
                index_keys(cut, model_folder, check="none", progress=kill)
            resumed = index_keys(cut, model_folder, check="none")
            assert 0 < resumed.resumed_entries < resumed.keyed_entries == resumed.entries
            assert digests_of(cut) == digests_of(tmp_path / "whole")


def test_an_equal_text_is_found_under_either_name_until_both_are_deleted(model_folder, tmp_path):
    build_index(
        model_folder,
        [*documents("a", [3, 4]), Document("other", TEXTS[3], metadata={"kind": "copy"})],
        tmp_path / "s",
        keys="now",
        check="none",
    )
    quote = " ".join(TEXTS[3].split()[:8])
    with load(model_folder, [tmp_path / "s"]) as lm:

        def found(**filters: object) -> list[set[str]]:
            passages = lm.find_passages(quote, **filters)
            also = {place.split(":")[0] for each in passages for place in each.also}
            spans = lm.trace(quote, min_tokens=12, **filters).spans
            return [
                {each.document_id for each in lm.search(None, quote, by="words", k=50, **filters)},
                {each.document_id for each in lm.search(None, quote, k=1, **filters)},
                {each.document_id for each in passages} | also,
                {each.document_id for span in spans for each in span.places},
            ]

        for gone, left in ((None, {"a-0", "other"}), ("a-0", {"other"}), ("other", set[str]())):
            if gone:
                lm.delete_documents([gone])
            for each in left:
                assert found(documents=each) == [{each}] * 4
            assert found(where={"kind": "copy"}) == [left & {"other"}] * 4
            words, state, passages, traced = found()
            assert (words, passages - {"a-1"}, traced, state - {"a-1"} <= left) == (left, left, left, True)
            tokens = lm.generate(quote, max_tokens=4, neighbors=16, temperature=0, lam=0.9, k=16)
            assert {near.document_id for token in tokens for near in token.neighbors} - {"a-1"} == left


def test_the_time_that_keys_take_is_that_of_the_texts_to_read(model_folder, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(estimate, "SURELY_QUICK", 0)
    monkeypatch.setattr(estimate, "_tokens_per_s", lambda *_: 10.0)
    seconds = []
    for number, copies in enumerate((1, 4)):
        store = tmp_path / str(number)
        build_index(model_folder, documents("a", [3] * copies), store, keys="none")
        with Datastore.open(store) as opened:
            seconds.append(estimate.seconds_of_keys(opened, checkpoint))
    assert seconds[0] == seconds[1] > 0
    index_keys(store, model_folder, check="none")
    add_to_index(model_folder, documents("b", [3]), store, keys="none")
    with Datastore.open(store) as opened:
        assert estimate.seconds_of_keys(opened, checkpoint) == 0
