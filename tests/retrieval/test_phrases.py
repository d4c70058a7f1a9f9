"""Phrases are found where they stand, by words alone, in documents that are there and that were asked for."""

import shutil
import unicodedata
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest

from memlm.base.phrases import MOST_WORDS, phrase_places, terms_of, words_of
from memlm.base.steps import run_steps
from memlm.data.corpus import Corpus, Document
from memlm.errors import InvalidInput
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived import passages as passages_module
from memlm.index.store.derived import words as words_module
from memlm.index.store.derived.words import SegmentWords
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.manifest import PASSAGES, WORDS
from memlm.indexing.build import add_to_index, build_index
from memlm.language_model import LanguageModel, load
from memlm.retrieval.phrases import Phrases

PHRASES = ["the memory", "MODEL of", "page, and", "it; it", "a\na", "the model", "zebra"]
CLOSING = "A stream has an end.\nClosing the\nstream ends the call; closing a door does not.\n"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents have many pieces, which are indexed in many steps."""
    monkeypatch.setattr(words_module, "PIECE_TOKENS", 60)
    monkeypatch.setattr(words_module, "OVERLAP_TOKENS", 24)
    monkeypatch.setattr(words_module, "PIECES_AT_ONCE", 3)


@pytest.fixture
def store(tmp_path: Path, store_folder: Path) -> Path:
    shutil.copytree(store_folder, tmp_path / "store", ignore=shutil.ignore_patterns(WORDS))
    return tmp_path / "store"


def by_loops(lm: LanguageModel, phrase: str) -> list[tuple[str, int, int]]:
    """Document, line and token of each place, from the whole texts."""
    snapshot = lm.engine.stores.model_store().snapshot
    places, words = [], words_of(phrase)
    for document in snapshot.documents():
        text = lm.detokenize(snapshot.tokens(document.id).tolist())
        pieces = [lm.checkpoint.tokenizer.token_bytes[token] for token in snapshot.tokens(document.id).tolist()]
        ends_N = np.cumsum([len(piece) for piece in pieces])
        for begin, _ in phrase_places(text, words):
            token = int(np.searchsorted(ends_N, len(text[:begin].encode()), side="right"))
            places.append((document.id, 1 + b"".join(pieces[:token]).count(b"\n"), token))
    return places


def found(lm: LanguageModel, phrase: str, k: int = 4000, **filters) -> list[tuple[str, int, int]]:
    neighbors = lm.search(None, phrase, k=k, by="words", **filters)
    return [(each.document_id, each.line, each.token_offset) for each in neighbors]


@pytest.mark.parametrize("phrase", PHRASES)
def test_places_are_those_of_a_search_through_the_whole_texts(lm, store, model_folder, phrase):
    with load(model_folder, [store]) as copied:
        expected = by_loops(copied, phrase)
        assert bool(expected) == (phrase != "zebra")
        assert found(copied, phrase) == expected
        assert found(copied, phrase, k=3) == expected[:3]
    assert len(list(store.glob(f"segments/*/{WORDS}"))) == 1
    with load(model_folder, [store]) as again:  # from the file
        assert found(again, phrase) == expected


def test_case_punctuation_and_line_ends_do_not_count(model_folder, tmp_path):
    (tmp_path / "service.md").write_text(CLOSING)
    build_index(model_folder, Corpus([tmp_path / "service.md"]), tmp_path / "store")
    with load(model_folder, [tmp_path / "store"]) as lm:
        (place,) = lm.search(None, "closing, the   STREAM", by="words")
        assert (place.document_id, place.line, place.char_offset) == ("service.md", 2, CLOSING.index("Closing"))
        assert (place.distance, place.weight) == (0.0, 0.0)
        assert "Closing the\n" in place.snippet
        assert not lm.search(None, "the stream ends a call", by="words")


ONE_WORD = {
    "accents": ["été", "ÉTÉ"],
    "Hindi": ["हिन्दी"],
    "Tamil": ["தமிழ்"],
    "Syriac with and without vowels": ["ܫܠܳܡܳܐ", "ܫܠܡܐ"],
    "Arabic with and without vowels": ["كِتَابٌ", "كتاب", "كتـــاب"],
    "Arabic letters with marks": ["آمنة", "آمِنة"],
    "Hebrew with and without vowels": ["שָׁלוֹם", "שלום"],
    "Persian with a joiner": ["می\u200cخواهم", "میخواهم"],
    "wide letters and digits": ["ＡＢＣ１２", "abc12"],
    "a soft hyphen": ["co\u00adoperate", "cooperate"],
    "the Turkish İ": ["İstanbul", "istanbul", "ISTANBUL"],
    "a ligature": ["ﬁne", "fine"],
    "Greek": ["Σίσυφος", "ΣΊΣΥΦΟΣ"],
    "a letter beside signs": ["C++", "c++", "Ｃ＋＋"],
    "another": ["C#", "c#"],
    "an emoji": ["❤", "❤️"],
}


@pytest.mark.parametrize("spellings", ONE_WORD.values(), ids=ONE_WORD)
def test_a_word_is_one_word_in_every_form(spellings):
    forms = {unicodedata.normalize(form, each) for form in ("NFC", "NFD") for each in spellings}
    (word,) = {tuple(words_of(each)) for each in forms}
    assert len(word) == 1
    for each in forms:
        text = f"x, {each}, y"
        assert list(phrase_places(text, word)) == [(3, 3 + len(each))]
        assert words_of(text)[1:-1] == list(word)


def test_a_long_run_of_letters_is_one_word_in_linear_time():
    """Names within it are looked for once. From each of its letters, this would take minutes."""
    run = "ab" * 500_000
    assert words_of(run) == terms_of(run) == [run]
    assert terms_of(f"{run}.c-d") == [run, "c", "d", f"{run}_c_d"]


def test_different_words_stay_different():
    words = ["C", "C++", "C#", "F#", "ete", "été", "हिन्दी", "हिन्द", "कि", "की", "s", "ß", "🙂", "❤"]
    assert len({tuple(words_of(word)) for word in words}) == len(words)
    assert words_of("a#b page#part c++17") == ["a", "b", "page", "part", "c", "17"]
    assert words_of("½") == words_of("1⁄2") == ["1", "2"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("학교에서 만나요", "학교"),
        ("ภาษาไทยเป็นภาษาราชการ", "ไทย"),
        ("ພາສາລາວແມ່ນ", "ລາວ"),
        ("မြန်မာစာသည်", "မာစာ"),
        ("ភាសាខ្មែរជាភាសា", "ខ្មែរ"),
        ("東京都に住む", "京都"),
        ("ﾊﾝｶｸｶﾅ", "カナ"),
        ("ガギグ", "ギグ"),
    ],
)
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_part_of_a_run_without_spaces_is_found(text, part, form):
    for other in ("NFC", "NFD"):
        assert list(phrase_places(unicodedata.normalize(form, text), words_of(unicodedata.normalize(other, part))))
    assert {*terms_of(part)} <= {*terms_of(text)}
    assert len(terms_of(part)) == 2 * len(words_of(part)) - 1  # each letter, and each two that stand together


def test_what_is_stored_in_one_form_is_found_in_the_other(model_folder, tmp_path):
    """By words and as a passage, with the places of the text as it is stored."""
    words = ["été", "Ångström", "हिन्दी", "தமிழ்", "ܫܠܳܡܳܐ", "שָׁלוֹם", "ガラス", "한국", "🙂"]
    stored = {
        form + str(number): unicodedata.normalize(form, f"{form} begin {word} end")
        for form in ("NFC", "NFD")
        for number, word in enumerate(words)
    }
    build_index(model_folder, [Document(*each) for each in stored.items()], tmp_path / "store", keys="none")
    with load(model_folder, [tmp_path / "store"]) as lm:
        for number, word in enumerate(words):
            expected = {f"NFC{number}", f"NFD{number}"}
            for form in ("NFC", "NFD"):
                asked = unicodedata.normalize(form, word)
                places = lm.search(None, asked, by="words")
                assert {each.document_id for each in places} == expected
                assert {each.char_offset for each in places} <= {9, 10}  # a token may begin with the space
                assert {each.document_id for each in lm.find_passages(asked, k=2)} == expected


def test_tables_that_an_older_rule_of_words_made_are_made_anew(model_folder, tmp_path):
    build_index(model_folder, [Document("a", "C++ is old")], tmp_path / "store", keys="none")
    with pytest.MonkeyPatch.context() as older:
        for module, rule in ((words_module, "words_of"), (passages_module, "terms_of")):
            older.setattr(module, "RULE", "1")
            older.setattr(module, rule, lambda text: text.lower().replace("+", "").split())
        with load(model_folder, [tmp_path / "store"]) as lm:
            lm.search(None, "old", by="words")
            lm.find_passages("old")
    made = {path: path.read_bytes() for name in (WORDS, PASSAGES) for path in tmp_path.rglob(name)}
    assert len(made) == 2
    with load(model_folder, [tmp_path / "store"]) as lm:
        assert [each.document_id for each in lm.search(None, "c++", by="words")] == ["a"]
        assert [each.document_id for each in lm.find_passages("c++")] == ["a"]
        assert lm.find_passages("c") == ()
    assert all(path.read_bytes() != content for path, content in made.items())


@pytest.mark.parametrize("text", ['" OR "', "a* NEAR(b", "'; drop table words --", "^col:", "!?", "", "\ufffd", "🙂"])
def test_a_phrase_may_hold_anything(lm, text):
    assert isinstance(found(lm, text), list)


def test_a_phrase_of_too_many_words_is_refused(lm):
    with pytest.raises(InvalidInput, match="has at most 100"):
        found(lm, "a " * (MOST_WORDS + 1))
    with pytest.raises(InvalidInput, match="state, words"):
        lm.search(None, "a", by="meaning")
    with pytest.raises(InvalidInput, match="nprobe"):
        lm.search(None, "a", by="words", nprobe=4)


def test_deleted_documents_are_not_found_and_a_purge_leaves_nothing_of_them(store, model_folder, tmp_path):
    (tmp_path / "secret.txt").write_text("the xylophone of a memory")
    add_to_index(model_folder, Corpus([tmp_path / "secret.txt"]), store)
    with load(model_folder, [store]) as lm:
        expected = found(lm, "the model")
        assert [place[:2] for place in found(lm, "xylophone of")] == [("secret.txt", 1)]
        lm.delete_documents(["secret.txt"])
        assert found(lm, "xylophone of") == []
        assert found(lm, "the model") == expected
    assert b"xylophone" in b"".join(path.read_bytes() for path in store.glob(f"segments/*/{WORDS}"))
    compact(store, purge=True)
    assert not [path for path in store.rglob("*") if path.is_file() and b"xylophone" in path.read_bytes()]
    with load(model_folder, [store]) as lm:
        assert found(lm, "the model") == expected


def test_an_index_that_a_purge_overtakes_is_not_published(store, model_folder, tokenizer):
    with Datastore.open(store) as datastore:
        (segment,) = datastore.snapshot.segments
        overtaken = SegmentWords(store, segment, tokenizer.decode_bytes)
        overtaken.build()
        assert list(store.rglob("*.tmp"))
        datastore.delete([next(datastore.snapshot.documents()).id])
        compact(store, purge=True)
        late = SegmentWords(store, segment, tokenizer.decode_bytes)
        for words in (overtaken, late):
            while not words.is_complete:
                words.build()
            assert list(words.pieces(["memory"]))
        assert not [*store.rglob(WORDS), *store.rglob("*.tmp")]


def test_what_a_kill_leaves_goes_with_the_next_commit(store, tokenizer):
    with Datastore.open(store) as datastore:
        SegmentWords(store, datastore.snapshot.segments[0], tokenizer.decode_bytes).build()
        assert list(store.rglob("*.tmp"))
        datastore.save_defaults(datastore.snapshot.defaults)
        assert not list(store.rglob("*.tmp"))


def test_a_foreign_or_damaged_file_is_made_anew(store, model_folder):
    (folder,) = (store / "segments").iterdir()
    (folder / WORDS).write_bytes(b"no database" * 500)
    with load(model_folder, [store]) as lm:
        assert found(lm, "the model") == by_loops(lm, "the model")
    (folder / WORDS).unlink()
    with load(model_folder, [store]) as lm:
        lm.search(None, "a", by="words")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words_module, "OVERLAP_TOKENS", 30)  # another way to cut
        with load(model_folder, [store]) as lm:
            assert found(lm, "the model") == by_loops(lm, "the model")


def test_where_the_folder_cannot_be_written_the_words_are_in_ram(store, model_folder):
    with load(model_folder, [store]) as lm:
        expected = by_loops(lm, "the model")
        shutil.rmtree(store)
        assert found(lm, "the model") == expected
    assert not store.exists()


def test_a_cancelled_search_leaves_its_pieces_to_the_next(store, tokenizer):
    with Datastore.open(store) as datastore:
        phrases = Phrases(datastore, tokenizer)
        steps = phrases.find(datastore.snapshot, "memory", 1, DocumentFilter())
        next(steps).work()
        steps.close()
        (words,) = phrases.words._made.values()
        assert words._done == 3
        assert len(run_steps(phrases.find(datastore.snapshot, "memory", 1, DocumentFilter()))) == 1


FILTERS = [
    {"documents": "doc-3.txt"},
    {"documents": ["doc-1*", "doc-7.txt"]},
    {"documents": "nowhere"},
    {"where": {"title": "doc-2.txt"}},
    {"documents": "doc-*", "where": ["title=doc-5.txt"]},
]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("by", ["words", "state"])
@pytest.mark.parametrize("few", [1 << 20, 0], ids=["one by one", "by the index"])
def test_filters_leave_the_places_of_the_documents_they_choose(lm, by, filters, few, monkeypatch):
    monkeypatch.setattr("memlm.index.store.segment.EXACT_ENTRIES", few)
    patterns = filters.get("documents", "*")
    patterns = [patterns] if isinstance(patterns, str) else patterns
    title = dict(each.split("=") for each in filters["where"])["title"] if isinstance(filters.get("where"), list) else (
        filters.get("where", {}).get("title")
    )  # fmt: skip
    everything = lm.search(None, "a", k=4000, by=by)
    expected = [
        place
        for place in everything
        if any(fnmatchcase(place.document_id, pattern) for pattern in patterns)
        and (title is None or place.title == title)
    ]
    assert bool(expected) == (patterns != ["nowhere"])
    key = ("document_id", "token_offset", "distance")
    got = lm.search(None, "a", k=4000, by=by, **filters)
    assert [tuple(getattr(each, name) for name in key) for each in got] == [
        tuple(getattr(each, name) for name in key) for each in expected
    ]
    assert lm.search(None, "a", k=2, by=by, **filters) == got[:2] or by == "state"
    assert len(lm.search(None, "a", k=2, by=by, **filters)) == min(2, len(got))


def test_a_folder_of_ids_is_a_filter():
    only = DocumentFilter(("docs/a", "notes/"))
    ids = ["docs/a", "docs/a/b.md", "docs/ab.md", "notes/x", "notes"]
    rows = [type("Row", (), {"id": each, "title": "", "metadata": {}})() for each in ids]
    assert [only.accepts(row) for row in rows] == [True, True, False, True, False]


def test_lines_of_titles_are_not_fields_twice(lm):
    with pytest.raises(InvalidInput, match="twice"):
        lm.search(None, "a", where=["a=1", "a=2"])
    with pytest.raises(InvalidInput, match="expected FIELD=VALUE"):
        lm.search(None, "a", where=["a"])
    assert np.isfinite([each.distance for each in lm.search(None, "a")]).all()
