"""Passages are those that the formulas rank first, over live documents alone, however these came into the store."""

import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from encoders import save_bert
from passage_cuts import cuts_by_lines

from memlm.api.passages import Passage
from memlm.base.phrases import forms_of, terms_of
from memlm.data.corpus import Corpus, Document
from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived import cuts as cuts_module
from memlm.index.store.derived import passages as passages_module
from memlm.index.store.derived.bm25 import Query, Searched
from memlm.index.store.derived.cuts import SegmentCuts
from memlm.index.store.derived.passages import SegmentPassages
from memlm.index.store.derived.postings import PostingsWriter, hash_of
from memlm.index.store.manifest import CUTS, PASSAGES, VECTORS
from memlm.indexing.build import add_to_index, build_index
from memlm.language_model import LanguageModel, load
from memlm.retrieval import passage_search

QUESTIONS = ["the memory of the model of the page", "Page; and, IT", "what does a stream end with?", "zebra crossing"]
LIMIT = 40


@pytest.fixture(autouse=True)
def small_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents have many passages, which are indexed in many steps."""
    monkeypatch.setattr(cuts_module, "LIMIT_TOKENS", LIMIT)
    monkeypatch.setattr(cuts_module, "PIECE_TOKENS", 200)
    monkeypatch.setattr(passages_module, "PASSAGES_AT_ONCE", 3)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert("no head", tmp_path_factory.mktemp("bert"))


@pytest.fixture
def store(tmp_path: Path, store_folder: Path) -> Path:
    shutil.copytree(store_folder, tmp_path / "store", ignore=shutil.ignore_patterns(CUTS, PASSAGES, VECTORS))
    return tmp_path / "store"


def places(passages: tuple[Passage, ...]) -> list[tuple[str, int]]:
    return [(each.document_id, each.token_offset) for each in passages]


def cut(lm: LanguageModel) -> list[tuple[str, int, str, str]]:
    """Document, first token, text and searched text of each live passage, from the whole documents."""
    model_store = lm.engine.stores.model_store()
    snapshot, cuts = model_store.snapshot, []
    for segment in snapshot.segments:
        for document in segment.live_documents():
            first, last = segment.starts[document.row : document.row + 2].tolist()
            tokens = [lm.tokenizer.decode_bytes([token]) for token in segment.values_N[first:last].tolist()]
            content, begins = b"".join(tokens), np.cumsum([0, *map(len, tokens)])
            found = cuts_by_lines(tokens, LIMIT, markdown=False) if tokens else []
            ends = [begin for begin, _ in found[1:]] + [len(content)]
            rows = [int(np.searchsorted(begins[1:], begin, side="right")) for begin, _ in found]
            for (begin, headings), end, row in zip(found, ends, rows, strict=True):
                text = content[begin:end].decode().strip()
                lines = [line for line in (document.title, *headings) if line]
                cuts.append((document.id, row, text, "\n".join([*lines, text])))
    return cuts


def bm25_by_loops(question: str, texts: list[str]) -> list[float]:
    """The formula, over lists of words."""
    documents = [terms_of(text) for text in texts]
    average = sum(map(len, documents)) / len(documents)
    scores = []
    for words in documents:
        score = 0.0
        for forms in forms_of(question):
            having = sum(not set(forms).isdisjoint(each) for each in documents)
            weight = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            count = sum(map(words.count, forms))
            score += weight * count * 2.2 / (count + 1.2 * (1 - 0.75 + 0.75 * len(words) / average))
        scores.append(score)
    return scores


def check_words(lm: LanguageModel, question: str) -> None:
    cuts = cut(lm)
    scores = bm25_by_loops(question, [searched for *_, searched in cuts])
    order = sorted((place for place in range(len(cuts)) if scores[place]), key=lambda place: -scores[place])
    found = lm.find_passages(question, by="words", k=1000)
    assert [each.score for each in found] == pytest.approx([scores[place] for place in order])
    known = {(name, row): (score, text) for (name, row, text, _), score in zip(cuts, scores, strict=True)}
    for each in found:
        assert (pytest.approx(each.score), each.text) == known[each.document_id, each.token_offset]


@pytest.mark.parametrize("question", QUESTIONS)
def test_words_are_ranked_by_bm25_over_the_texts(store, model_folder, question):
    with load(model_folder, [store]) as lm:
        check_words(lm, question)
        some = lm.find_passages(question, k=3)  # by auto, which is by words without an encoder
        assert some == lm.find_passages(question, by="words", k=1000)[:3]
        assert bool(some) == (question != "zebra crossing")
    (file,) = store.glob(f"segments/*/{PASSAGES}")
    written = file.stat()
    with load(model_folder, [store]) as again:  # from the file, which other commits keep
        again.remember("other words")
        again.delete_documents([again.remember("more words").document_ids[0]])
        assert file.stat() == written
        check_words(again, question)


@pytest.mark.parametrize("piece_tokens", [2, 200])  # shorter than a passage, and longer
def test_a_passage_names_the_lines_that_hold_its_text(model_folder, tmp_path, monkeypatch, piece_tokens):
    monkeypatch.setattr(cuts_module, "PIECE_TOKENS", piece_tokens)
    lines = {
        name: [f"{name}{n} holds a word" if n % 3 else "" for n in range(first, first + 60)]
        for name, first in (("a", 0), ("b", 1))
    }
    for name, each in lines.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(each))
    build_index(model_folder, Corpus([tmp_path / "a.txt"]), tmp_path / "store", check="none")
    add_to_index(model_folder, Corpus([tmp_path / "b.txt"]), tmp_path / "store")
    with load(model_folder, [tmp_path / "store"]) as lm:
        found = lm.find_passages("which line holds a word?", k=1000)
    assert len({each.first_line for each in found}) > 20
    for each in found:
        held = lines[each.document_id.removesuffix(".txt")][each.first_line - 1 : each.last_line]
        assert len(held) == len(each.text.split("\n"))
        assert each.text in "\n".join(held)
        assert each.place == f"{each.document_id}:{each.first_line}" + f"-{each.last_line}" * (len(held) > 1)


def test_the_twin_counts_every_word_of_the_alphabets(model_folder, tmp_path):
    texts = {"a": "Straße, ÉTÉ état! 東京 is big", "b": "strasse x_y x-y 42", "c": "été 42 42 42 a\u0301"}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    build_index(model_folder, Corpus([tmp_path]), tmp_path / "store", check="none")
    with load(model_folder, [tmp_path / "store"]) as lm:
        for question in ("STRASSE", "été", "京", "x_y 42", "a\u0301", '" OR a* NEAR('):
            check_words(lm, question)
        assert [each.document_id for each in lm.find_passages("京", by="words")] == ["a.txt"]


def test_equal_passages_keep_the_order_of_the_documents(model_folder, tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_text(f"the memory {number:02d}" if number % 3 else "a page")
    build_index(model_folder, Corpus([tmp_path]), tmp_path / "store", check="none")
    with load(model_folder, [tmp_path / "store"]) as lm:
        expected = [(f"{number:02d}.txt", 0) for number in range(40) if number % 3]
        assert places(lm.find_passages("memory", by="words", k=1000)) == expected


@pytest.mark.parametrize("by", ["words", "meaning"])
def test_filters_choose_documents_and_change_no_score(store, model_folder, bert, by):
    with load(model_folder, [store], passage_encoder=bert) as lm:
        everything = lm.find_passages("the page", by=by, k=1000)
        some = lm.find_passages("the page", by=by, k=1000, documents="doc-3.txt")
        assert some == tuple(each for each in everything if each.document_id == "doc-3.txt")
        assert 0 < len(some) < len(everything)


@pytest.mark.parametrize("by", ["words", "meaning"])
def test_excluded_documents_count_nowhere(store, model_folder, bert, corpus_folder, tmp_path, by):
    """Deleted ones neither: tests/test_never_there.py."""
    for number in (0, 2, 4, 6):
        shutil.copy(corpus_folder / f"doc-{number}.txt", tmp_path)
    build_index(model_folder, Corpus(sorted(tmp_path.glob("*.txt"))), tmp_path / "fresh", check="none")
    with load(model_folder, [tmp_path / "fresh"], passage_encoder=bert) as fresh:
        expected = [(each.text, each.score) for each in find_all(fresh, by)]
    gone = [f"doc-{number}.txt" for number in (1, 3, 5, 7)]
    with load(model_folder, [store], passage_encoder=bert) as lm:
        before = find_all(lm, by)
        assert [(each.text, each.score) for each in find_all(lm, by, exclude_documents=gone)] == expected
        assert find_all(lm, by) == before


def find_all(lm: LanguageModel, by: str, **options) -> tuple[Passage, ...]:
    return lm.find_passages("the page and the memory", by=by, k=1000, **options)


def test_segments_and_datastores_are_ranked_as_one(store, model_folder, bert, corpus_folder, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    files = sorted(corpus_folder.iterdir())
    build_index(model_folder, Corpus(files[:3]), first, check="none")
    build_index(model_folder, Corpus(files[5:]), second, check="none")
    add_to_index(model_folder, Corpus(files[3:5]), first, check="none")
    with (
        load(model_folder, [store], passage_encoder=bert) as one,
        load(model_folder, [first, second], passage_encoder=bert) as several,
    ):
        for by in ("words", "meaning"):
            expected, found = find_all(one, by), find_all(several, by)
            assert [each.score for each in found] == pytest.approx([each.score for each in expected], abs=1e-3)
            assert {each.store for each in found} == {"first", "second"}


def test_a_remembered_text_is_found_at_once_and_a_purge_leaves_nothing_of_it(store, model_folder, bert):
    with load(model_folder, [store], passage_encoder=bert) as lm:
        lm.remember("the xylophone of a memory", document_id="note", title="Note", metadata={"by": "Ana"})
        (found,) = lm.find_passages("Who has a xylophone?", by="words", k=1)
        assert (found.document_id, found.title, found.metadata, found.token_offset) == (
            "note",
            "Note",
            {"by": "Ana"},
            0,
        )
        assert (found.text, found.num_tokens) == ("the xylophone of a memory", len(lm.tokenize(found.text)))
        assert "note" in {each.document_id for each in lm.find_passages("a xylophone", k=1000, by="meaning")}
        vector = lm.engine.passage_encoder.vectors([f"Note\n{found.text}"])[0].astype("<f4").tobytes()
        lm.delete_documents(["note"])
        assert not lm.find_passages("xylophone", by="words")
        assert "note" not in {each.document_id for each in lm.find_passages("a xylophone", k=1000, by="meaning")}
    term = hash_of(*terms_of("xylophone")).to_bytes(8, "little")
    for trace, name in ((term, PASSAGES), (vector, VECTORS)):
        assert trace in b"".join(path.read_bytes() for path in store.glob(f"segments/*/{name}"))
    compact(store, purge=True)
    for content in [path.read_bytes() for path in store.rglob("*") if path.is_file()]:
        assert term not in content
        assert vector not in content
        assert b"xylophone" not in content


def test_an_index_that_a_purge_overtakes_is_not_published(store, tokenizer):
    with Datastore.open(store) as datastore:
        (segment,) = datastore.snapshot.segments
        whole = SegmentCuts(store, segment, tokenizer.decode_bytes)
        while not whole.is_complete:
            whole.build()
        (store / segment.record.folder / CUTS).unlink()
        cuts, begun = SegmentCuts(store, segment, tokenizer.decode_bytes), SegmentPassages(store, segment, whole)
        cuts.build()
        begun.build()
        assert len(list(store.rglob("*.tmp"))) == 2
        datastore.delete([next(datastore.snapshot.documents()).id])
        compact(store, purge=True)
        while not cuts.is_complete:
            cuts.build()
        for passages in (begun, SegmentPassages(store, segment, cuts)):
            while not passages.is_complete:
                passages.build()
            assert len(Query([Searched(passages.postings)], [terms_of("memory")]).best(1)[0])
        assert not [*store.rglob(CUTS), *store.rglob(PASSAGES), *store.rglob("*.tmp")]


def test_a_damaged_or_foreign_file_is_made_anew(store, model_folder):
    (folder,) = (store / "segments").iterdir()
    for name in (CUTS, PASSAGES):
        (folder / name).write_bytes(b"no database" * 500)
    with load(model_folder, [store]) as lm:
        check_words(lm, "the memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts_module, "LIMIT_TOKENS", 1000)  # another way to cut
        with load(model_folder, [store]) as lm:
            assert {each.token_offset for each in lm.find_passages("the", by="words", k=1000)} == {0}


def test_a_file_that_is_damaged_within_says_what_to_do(store, model_folder):
    with load(model_folder, [store]) as lm:
        expected = places(lm.find_passages("the memory", k=1000))
    (file,) = store.glob(f"segments/*/{PASSAGES}")
    content = file.read_bytes()
    terms = json.loads(content[content.rindex(b'{"identity"') : -24])["blocks"][0]["terms"]
    file.write_bytes(content[: 8 * terms] + b"\xff" * 4 * terms + content[12 * terms :])  # how often each term stands
    with load(model_folder, [store]) as lm, pytest.raises(Corrupt, match=rf"{PASSAGES} is damaged .* remove it"):
        lm.find_passages("the memory")
    file.unlink()
    with load(model_folder, [store]) as lm:
        assert places(lm.find_passages("the memory", k=1000)) == expected


def test_damaged_cuts_say_what_to_do_or_are_made_anew_and_give_no_wrong_place(tmp_path, model_folder, tokenizer):
    rng, store, told = random.Random(0), tmp_path / "store", set[str]()
    texts = [Document(f"{name}.md", f"# Title {name}\n\n" + f"## Part\n\n{name} went. " * 20) for name in "abcd"]
    build_index(model_folder, Corpus(texts), store, keys="none", check="none")

    def read() -> list[tuple]:
        cuts = SegmentCuts(store, segment, tokenizer.decode_bytes)
        while not cuts.is_complete:
            cuts.build()
        every = range(len(cuts))
        places = zip(map(cuts.rows, every), map(cuts.ends_before, every), strict=True)
        return [*zip(places, cuts.texts(every), cuts.headings(every), strict=True)]

    with Datastore.open(store) as datastore:
        (segment,) = datastore.snapshot.segments
        expected, (file,) = read(), store.rglob(CUTS)
        content = file.read_bytes()
        for _ in range(300):
            damaged = bytearray(content)
            for _ in range(rng.choice([1, 3, 20])):
                damaged[rng.randrange(len(content))] = rng.randrange(256)
            file.write_bytes(damaged[: rng.randrange(len(content)) if rng.random() < 0.2 else None])
            try:
                assert read() == expected
            except Corrupt as error:
                told.add(str(error))
    assert all(each.endswith("; remove it, and the next search makes it anew") for each in told)
    assert any("places of piece" in each for each in told)
    assert any("headings" in each for each in told)
    assert any("the lines before" in each for each in told)


def test_what_a_kill_leaves_of_passages_goes_with_the_next_commit(store, tokenizer):
    with Datastore.open(store) as datastore:
        (segment,) = datastore.snapshot.segments
        cuts = SegmentCuts(store, segment, tokenizer.decode_bytes)
        while not cuts.is_complete:
            cuts.build()
        SegmentPassages(store, segment, cuts).build()
        assert list(store.rglob(f"{PASSAGES}.*.tmp"))
        datastore.save_defaults(datastore.snapshot.defaults)
        assert not list(store.rglob("*.tmp"))


def test_a_full_disk_moves_the_passages_to_ram(store, model_folder, monkeypatch):
    write, full = PostingsWriter.finish, []

    def refuse(self, identity):
        if not full:
            full.append(identity)
            raise OSError(28, "no space left on device")
        write(self, identity)

    monkeypatch.setattr(PostingsWriter, "finish", refuse)
    with load(model_folder, [store]) as lm:
        check_words(lm, "the memory")
    assert full
    assert not [*store.rglob(PASSAGES), *store.rglob("*.tmp")]


def test_a_folder_that_cannot_be_written_keeps_its_passages_in_ram(store, model_folder, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "read-only")

    monkeypatch.setattr("memlm.index.store.derived.files.DerivedFile.begun", refuse)
    with load(model_folder, [store]) as lm:
        check_words(lm, "the memory")
    assert not [*store.rglob(CUTS), *store.rglob(PASSAGES)]


def test_a_search_by_meaning_without_an_encoder_says_what_to_do(lm):
    with pytest.raises(
        Incompatible, match=r"search by words, or run `memlm models pull minilm`.* where the model runs"
    ):
        lm.find_passages("the memory", by="meaning")


def test_a_store_without_keys_is_searched_by_words_too(model_folder, corpus_folder, tmp_path):
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "drafts", keys="none")
    with load(model_folder, [tmp_path / "drafts"]) as lm:
        assert lm.find_passages("the memory", by="words")
        assert lm.find_passages("the memory") == lm.find_passages("the memory", by="words")


def test_wrong_requests_are_refused(lm, model_folder):
    for options, field in (({"by": "state"}, "by"), ({"k": 0}, "k"), ({"where": ["a"]}, "where")):
        with pytest.raises(InvalidInput) as error:
            lm.find_passages("the memory", **options)
        assert error.value.field == field
    with pytest.raises(InvalidInput, match="question is empty"):
        lm.find_passages("  ")
    with pytest.raises(NotFound, match="no document 'nothing'"):
        lm.find_passages("the memory", exclude_documents="nothing")
    with load(model_folder) as alone, pytest.raises(InvalidInput, match="no datastore is loaded"):
        alone.find_passages("the memory")


def test_the_first_words_of_a_long_question_are_looked_up(store, model_folder, monkeypatch):
    monkeypatch.setattr(passage_search, "MOST_WORDS", 2)
    with load(model_folder, [store]) as lm:
        words = lm.find_passages(QUESTIONS[0], k=1)[0].text.split()[:3]
        assert lm.find_passages(" ".join(words)) == lm.find_passages(" ".join(words[:2]))


def test_a_passage_behind_many_copies_is_found(model_folder, tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02d}.txt").write_text("a memory, and another memory")
    (tmp_path / "other.txt").write_text("the page has one memory of the end of a long stream")
    build_index(model_folder, Corpus([tmp_path]), tmp_path / "store", check="none")
    with load(model_folder, [tmp_path / "store"]) as lm:
        assert [each.document_id for each in lm.find_passages("memory", k=2)] == ["00.txt", "other.txt"]
