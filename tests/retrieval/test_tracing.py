"""A trace has the passages that stand in documents which are there, and all of the longest ones."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from memlm.api.tracing import Trace
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput, NotFound
from memlm.index import suffix_array
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived import suffixes as suffixes_module
from memlm.index.store.derived.suffixes import SegmentSuffixes
from memlm.index.store.manifest import SUFFIXES
from memlm.indexing.build import add_to_index, build_index
from memlm.language_model import LanguageModel, load

SECRET = "a xylophone of brass remembers every single tone of the evening"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments have several pieces, and some passages are longer than what is sorted."""
    for module in (suffix_array, suffixes_module):
        monkeypatch.setattr(module, "PIECE_TOKENS", 300)
        monkeypatch.setattr(module, "DEPTH", 16)
    monkeypatch.setattr("memlm.retrieval.tracing.DEPTH", 16)
    monkeypatch.setattr("memlm.retrieval.tracing.POSITIONS_AT_ONCE", 20)


@pytest.fixture
def store(tmp_path: Path, store_folder: Path) -> Path:
    shutil.copytree(store_folder, tmp_path / "store", ignore=shutil.ignore_patterns(SUFFIXES))
    return tmp_path / "store"


def document_tokens(lm: LanguageModel) -> dict[str, list[int]]:
    snapshot = lm.engine.stores.model_store().snapshot
    return {document.id: snapshot.tokens(document.id).tolist() for document in snapshot.documents()}


def places_of(passage: list[int], tokens: list[int]) -> list[int]:
    looked_for, text = ("".join(map(chr, each)) for each in (passage, tokens))  # a character a token: comparing is fast
    return [at for at in range(len(tokens)) if text.startswith(looked_for, at)]


def stands_in(passage: list[int], tokens: list[int]) -> bool:
    return "".join(map(chr, passage)) in "".join(map(chr, tokens))


def cuts(lm: LanguageModel, tokens: list[int], at: int) -> bool:
    """Whether a word or a character goes on at a token."""
    before, after = (lm.checkpoint.tokenizer.decode_bytes(part) for part in (tokens[:at], tokens[at:]))
    try:
        return before.decode()[-1:].isalnum() and after.decode()[:1].isalnum()
    except UnicodeDecodeError:
        return True


def by_loops(lm: LanguageModel, text: str, least: int) -> list[tuple[str, int, dict[str, int]]]:
    """Text and count of each span, and the first place in each document: every passage, compared everywhere."""
    tokens, documents = lm.tokenize(text), document_tokens(lm)
    passages: list[tuple[int, int]] = []
    for begin in range(len(tokens)):
        end = begin
        while end < len(tokens) and any(stands_in(tokens[begin : end + 1], each) for each in documents.values()):
            end += 1
        if end - begin >= least and not (passages and end <= passages[-1][1]):
            passages.append((begin, end))
    at = [len(lm.detokenize(tokens[:count])) for count in range(len(tokens) + 1)]
    spans: list[tuple[int, int]] = []
    for begin, end in passages:
        while cuts(lm, tokens, begin):
            begin += 1
        while cuts(lm, tokens, end):
            end -= 1
        if end - begin >= least:
            spans.append((begin, end))
    found = []
    for begin, end in sorted(set(spans)):
        if any(one <= begin and end <= other for one, other in set(spans) - {(begin, end)}):
            continue
        places = {name: places_of(tokens[begin:end], each) for name, each in documents.items()}
        first = {name: each[0] for name, each in places.items() if each}
        found.append((text[at[begin] : at[end]].lstrip(), sum(map(len, places.values())), first))
    return found


def shown(trace: Trace) -> list[tuple[str, int, dict[str, int]]]:
    return [
        (span.text, span.count, {place.document_id: place.token_offset for place in span.places})
        for span in trace.spans
    ]


def patchwork(lm: LanguageModel, number: int) -> str:
    """A text with passages of two documents, cut within words, some of them longer than what is sorted."""
    one, two = (lm.detokenize(tokens) for tokens in list(document_tokens(lm).values())[number : number + 2])
    return f"zebras {one[5:190]} zebra {two[11:60]} é猫 {one[:30]}zebra {two[100:140]}"


@pytest.mark.parametrize("least", [2, 6, 9])
def test_spans_are_those_of_a_comparison_of_all_passages(store, model_folder, least):
    with load(model_folder, [store]) as lm:
        for text in (patchwork(lm, 0), patchwork(lm, 3), "the memory"):
            traced = lm.trace(text, min_tokens=least, spans_per_token=1.0, max_documents=20)
            assert shown(traced) == by_loops(lm, text, least)
            assert all(text[span.begin : span.end] == span.text for span in traced.spans)
            assert traced.tokens == len(lm.tokenize(text))
        expected = lm.trace(text, min_tokens=least)
    assert len(list(store.glob(f"segments/*/{SUFFIXES}"))) == 1
    with load(model_folder, [store]) as again:  # from the file
        assert again.trace(text, min_tokens=least) == expected


def test_what_is_kept_is_rare_or_long_and_in_order(store, model_folder, lm):
    text = patchwork(lm, 2)
    with load(model_folder, [store]) as copied:
        every = copied.trace(text, min_tokens=2, spans_per_token=1.0).spans
        tokens = len(copied.tokenize(text))
        for rank_by, rank in (("rarity", lambda span: span.rarity), ("length", lambda span: span.tokens)):
            kept = copied.trace(text, min_tokens=2, spans_per_token=3 / tokens, rank_by=rank_by).spans
            assert len(kept) == 3 < len(every)
            assert sorted(map(rank, kept)) == sorted(map(rank, every))[-3:]
            assert [span.begin for span in kept] == sorted(span.begin for span in kept)
        assert len(copied.trace(text, spans_per_token=1e-9).spans) == 1
        counts = np.bincount(np.concatenate(list(document_tokens(copied).values())))
        (span,) = copied.trace(" the memory", min_tokens=2).spans
        expected = -np.log(counts[copied.tokenize(" the memory")] / counts.sum()).sum()
        assert span.rarity == pytest.approx(expected)
        assert len(copied.trace(" the", min_tokens=2, max_documents=2).spans[0].places) == 2


def test_deleted_documents_never_show_and_a_purge_leaves_nothing_of_them(store, model_folder, tmp_path):
    (tmp_path / "secret.txt").write_text(f"I heard {SECRET}. the memory of a model can be read and edited")
    add_to_index(model_folder, Corpus([tmp_path / "secret.txt"]), store)
    with load(model_folder, [store]) as lm:
        text = f"they say {SECRET}, and the memory of a model can be read and edited. {patchwork(lm, 3)}"
        (whole, *_) = lm.trace(text, rank_by="length", spans_per_token=1.0).spans
        assert whole.text == SECRET
        assert [(place.document_id, place.line) for place in whole.places] == [("secret.txt", 1)]
        assert SECRET in whole.places[0].snippet
        lm.delete_documents(["secret.txt", "doc-3.txt"])
        left = lm.trace(text, min_tokens=2, spans_per_token=1.0, max_documents=20)
        assert shown(left) == by_loops(lm, text, 2)
        assert "secret.txt" not in repr(left)
        assert "doc-3.txt" not in repr(left)
    compact(store, purge=True)
    with load(model_folder, [store]) as lm:
        assert lm.trace(text, min_tokens=2, spans_per_token=1.0, max_documents=20) == left
    assert not list(store.rglob("*.tmp"))


def test_filters_choose_documents(store, model_folder, lm):
    text = patchwork(lm, 4)
    with load(model_folder, [store]) as copied:
        name = copied.trace(text).spans[0].places[0].document_id
        only = copied.trace(text, documents=name)
        assert only.spans
        assert {place.document_id for span in only.spans for place in span.places} == {name}
        assert copied.trace(text, where={"title": name}) == only
        assert copied.trace(text, documents=["nowhere"]) == Trace(len(copied.tokenize(text)), 0)


def test_several_datastores_are_traced_together(store, model_folder, tmp_path, lm):
    (tmp_path / "other.txt").write_text(f"I heard {SECRET}")
    build_index(model_folder, Corpus([tmp_path / "other.txt"]), tmp_path / "other", check="none")
    text = f"{patchwork(lm, 1)} {SECRET}"
    with load(model_folder, [store, tmp_path / "other"]) as both:
        stores = {place.store for span in both.trace(text).spans for place in span.places}
        assert stores == {"store", "other"}
        assert [span.text for span in both.trace(text, "other").spans] == [SECRET]
        with pytest.raises(NotFound, match="nowhere"):
            both.trace(text, "nowhere")
    with load(model_folder) as alone, pytest.raises(InvalidInput, match="no datastore is loaded"):
        alone.trace(text)


def test_any_text_has_a_trace(lm):
    for text in ("", "a", "\0", "🙂" * 50, "猫" * 100, " ", "\ud7ff", "a" * 5000):
        traced = lm.trace(text, min_tokens=2)
        assert all(text[span.begin : span.end] == span.text for span in traced.spans)
    with pytest.raises(InvalidInput, match="min_tokens is 1"):
        lm.trace("a", min_tokens=1)
    with pytest.raises(InvalidInput, match="rank_by"):
        lm.trace("a", rank_by="beauty")
    with pytest.raises(InvalidInput, match="unknown option 'k'; the options are min_tokens"):
        lm.trace("a", k=3)


def test_a_damaged_foreign_or_unwritable_file_is_made_anew(store, model_folder, lm):
    text = patchwork(lm, 0)
    with load(model_folder, [store]) as copied:
        expected = copied.trace(text)
        (file,) = store.glob(f"segments/*/{SUFFIXES}")
    content = file.read_bytes()
    for damaged in (b"", b"no suffixes" * 50, content[:-1], content.replace(b"1 ", b"2 ", 1)):
        file.unlink()
        file.write_bytes(damaged)
        with load(model_folder, [store]) as copied:
            assert copied.trace(text) == expected
        assert file.read_bytes() == content
    with load(model_folder, [store]) as copied:
        shutil.rmtree(store)
        assert copied.trace(text) == expected
    assert not store.exists()


def test_an_array_that_a_commit_overtakes_stays_in_ram(store):
    with Datastore.open(store) as datastore:
        (segment,) = datastore.snapshot.segments
        overtaken, whole = SegmentSuffixes(store, segment), SegmentSuffixes(store, segment)
        overtaken.build()
        assert list(store.rglob("*.tmp"))
        datastore.save_defaults(datastore.snapshot.defaults)
        assert not list(store.rglob("*.tmp"))
        for suffixes in (overtaken, whole):
            while not suffixes.is_complete:
                suffixes.build()
        for one, other in zip(overtaken.array.orders, whole.array.orders, strict=True):
            assert one.tolist() == other.tolist()
        assert not list(store.rglob("*.tmp"))
