"""An encoder's vectors rank passages, and are made once."""

import errno
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from encoders import encoder_tokenizer, save_bert
from typer.testing import CliRunner

from memlm.api.answers import FindPassagesRequest
from memlm.base.steps import run_steps
from memlm.cli.app import app
from memlm.data.corpus import Corpus, Document
from memlm.errors import Incompatible, InvalidInput
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived import cuts, passage_vectors
from memlm.index.store.derived.cuts import SegmentCuts
from memlm.index.store.derived.passage_vectors import HEADER_BYTES, SegmentVectors
from memlm.index.store.manifest import PASSAGES, VECTORS
from memlm.indexing import vectors as vectors_module
from memlm.indexing.build import add_to_index, build_index
from memlm.indexing.vectors import make_vectors
from memlm.language_model import LanguageModel, load
from memlm.model.files.encoder_files import load_encoder
from memlm.retrieval.passage_search import COSINE_WEIGHT, MANY_WORDS, NEARLY_CLOSE

QUESTION = "the memory of the model"


@pytest.fixture(autouse=True)
def small_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents have many passages, which are indexed in many steps."""
    monkeypatch.setattr(cuts, "LIMIT_TOKENS", 40)
    monkeypatch.setattr(passage_vectors, "PASSAGES_AT_ONCE", 7)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return save_bert("no head", tmp_path_factory.mktemp("bert"))


@pytest.fixture
def store(tmp_path: Path, store_folder: Path) -> Path:
    shutil.copytree(store_folder, tmp_path / "store", ignore=shutil.ignore_patterns(PASSAGES, VECTORS))
    return tmp_path / "store"


def opened(model_folder: Path, store: Path, encoder: Path | None) -> LanguageModel:
    return load(model_folder, [store], passage_encoder=encoder)


def scores_of(lm: LanguageModel, by: str, question: str = QUESTION) -> dict[tuple[str, int], float]:
    return {(each.document_id, each.token_offset): each.score for each in lm.find_passages(question, by=by, k=1000)}


def order(lm: LanguageModel, by: str) -> list[tuple[str, int]]:
    return [(each.document_id, each.token_offset) for each in lm.find_passages(QUESTION, by=by, k=1000)]


def test_by_meaning_they_are_ranked_by_the_cosine_of_their_vectors(model_folder, store, bert):
    encoder = load_encoder(bert)
    with opened(model_folder, store, bert) as lm:
        found = lm.find_passages(QUESTION, by="meaning", k=1000)
        everything = lm.find_passages("the page", by="words", k=1000)
    question_D = encoder.vectors([QUESTION])[0]
    for each in found:
        text = f"{each.title}\n{each.text}"
        assert each.score == pytest.approx(float(encoder.vectors([text])[0] @ question_D), abs=1e-5)
    scores = [each.score for each in found]
    assert scores == sorted(scores, reverse=True)
    assert {each.document_id for each in found} >= {each.document_id for each in everything}
    assert len(found) >= len(everything) > 20


def sums(lm: LanguageModel, question: str, cosines: dict[tuple[str, int], float]) -> dict[tuple[str, int], float]:
    """The formula, with the frequency of each word by a search for it alone."""
    words, most = scores_of(lm, "words", question), 0.0
    for word in set(question.split()):
        having = len(lm.find_passages(word, by="words", k=1000))
        most += 2.2 * math.log(1 + (len(cosines) - having + 0.5) / (having + 0.5))
    return {place: words.get(place, 0) / most + COSINE_WEIGHT * cosine for place, cosine in cosines.items()}


@pytest.mark.parametrize("question", [QUESTION, "page", "what does a zebra cross"])
def test_auto_adds_the_share_of_words_and_weighted_cosines(model_folder, store, bert, tokenizer, question):
    make_vectors(store, tokenizer, load_encoder(bert))
    with opened(model_folder, store, bert) as lm:
        expected = sums(lm, question, scores_of(lm, "meaning", question))
        assert scores_of(lm, "auto", question) == pytest.approx(expected)
        best = sorted(expected.values(), reverse=True)
        for k in (1, 3, 8, 20):
            assert [each.score for each in lm.find_passages(question, k=k)] == pytest.approx(best[:k])
        some = {place: score for place, score in expected.items() if place[0] == "doc-3.txt"}
        found = lm.find_passages(question, k=2, documents="doc-3.txt")
        assert [each.score for each in found] == pytest.approx(sorted(some.values(), reverse=True)[:2])


def test_passages_without_a_vector_are_found_by_their_words(model_folder, store, bert, monkeypatch):
    with opened(model_folder, store, bert) as lm:  # none has one, and an answer does not wait for them
        assert scores_of(lm, "auto") == scores_of(lm, "words")
        assert not list(store.rglob(VECTORS))
        lm.delete_documents(["doc-0.txt"])  # whose vectors are made, and count nowhere
        model_store = lm.engine.stores.model_store()
        (segment,) = model_store.snapshot.segments
        num_gone = int((run_steps(model_store.whole_cuts_of(segment)).documents_P == 0).sum())
        run_steps(model_store.vectors_of(segment, lm.engine.passage_encoder)).build(num_gone + 9)
        half = scores_of(lm, "auto")
        words, meaning = scores_of(lm, "words"), scores_of(lm, "meaning")
        known = {place: meaning[place] for place in sorted(meaning)[:9]}
        mean = sum(known.values()) / 9
        expected = sums(lm, QUESTION, {place: known.get(place, mean) for place in meaning})
    assert half == pytest.approx({place: expected[place] for place in expected if place in {*known, *words}})


@pytest.mark.parametrize("by", ["meaning", "auto"])
def test_segments_and_deleted_documents_are_ranked_as_one_store(
    model_folder, corpus_folder, tmp_path, bert, tokenizer, by
):
    encoder, files = load_encoder(bert), sorted(corpus_folder.iterdir())
    build_index(model_folder, Corpus(files[:4]), tmp_path / "one", check="none")
    build_index(model_folder, Corpus(files[:3]), tmp_path / "parts", check="none")
    add_to_index(model_folder, Corpus([files[5], files[3]]), tmp_path / "parts", check="none")
    for store in ("one", "parts"):
        make_vectors(tmp_path / store, tokenizer, encoder)
    with opened(model_folder, tmp_path / "one", bert) as lm, opened(model_folder, tmp_path / "parts", bert) as parts:
        expected = scores_of(lm, by)
        assert scores_of(parts, by) != expected
        parts.delete_documents([files[5].name])
        assert scores_of(parts, by) == pytest.approx(expected, abs=1e-6)
        assert order(parts, by) == order(lm, by)


def test_vectors_are_made_once_and_anew_for_another_encoder(model_folder, store, bert, tmp_path, monkeypatch):
    with opened(model_folder, store, bert) as lm:
        meaning = order(lm, "meaning")
    (file,) = store.rglob(VECTORS)
    content = file.read_bytes()
    with opened(model_folder, store, bert) as lm:
        assert order(lm, "meaning") == meaning
    assert file.read_bytes() == content
    other = save_bert("no head", tmp_path / "other", seed=8)
    with opened(model_folder, store, other) as lm:
        assert order(lm, "meaning") != meaning
    assert file.read_bytes() != content
    file.write_bytes(b"no database" * 500)
    with opened(model_folder, store, bert) as lm:
        assert order(lm, "meaning") == meaning


def test_vectors_in_another_type_are_others(model_folder, store, bert):
    plain, narrow = load_encoder(bert, dtype="float32"), load_encoder(bert, dtype="bfloat16")
    assert plain.fingerprint == load_encoder(bert, dtype="float32").fingerprint != narrow.fingerprint
    with opened(model_folder, store, bert) as lm:
        lm.engine.passage_encoder = plain
        order(lm, "meaning")
        (file,) = store.rglob(VECTORS)
        content = file.read_bytes()
    with opened(model_folder, store, bert) as lm:
        lm.engine.passage_encoder = narrow
        order(lm, "meaning")
    assert file.read_bytes() != content


def test_an_encoder_whose_files_changed_after_it_was_loaded_is_refused(bert, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "bert")
    encoder = load_encoder(folder)
    save_bert("no head", folder, seed=9)
    with pytest.raises(Incompatible, match="changed after the encoder was loaded"):
        _ = encoder.fingerprint


def test_the_command_makes_vectors_that_searches_use(store, bert, model_folder):
    more = ["--model", str(model_folder), "--encoder", str(bert), "--json"]
    made = CliRunner().invoke(app, ["index", "vectors", str(store), *more])
    assert made.exit_code == 0, made.output
    figures = json.loads(made.stdout)
    assert figures["made"] == figures["passages"] > 20
    assert not figures["missing"]
    found = CliRunner().invoke(app, ["index", "passages", str(store), QUESTION, *more, "--k", "1000"])
    assert len(json.loads(found.stdout)["passages"]) == figures["passages"]
    with pytest.raises(InvalidInput, match="pull minilm"):
        CliRunner().invoke(app, ["index", "vectors", *made_args(store, model_folder)], catch_exceptions=False)


def made_args(store, model_folder):
    return [str(store), "--model", str(model_folder)]


def test_deleted_and_added_documents_are_followed(model_folder, store, bert):
    with opened(model_folder, store, bert) as lm:
        before = order(lm, "meaning")
        lm.delete_documents(["doc-7.txt"])
        assert order(lm, "meaning") == [each for each in before if each[0] != "doc-7.txt"]
        lm.remember("the memory of the model", document_id="note")
        assert order(lm, "meaning")[0] == ("note", 0)


def test_a_datastore_without_keys_is_searched_by_meaning_too(tmp_path, model_folder, corpus_folder, bert):
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "drafts", keys="none")
    with opened(model_folder, tmp_path / "drafts", bert) as lm:
        assert order(lm, "meaning")
        assert order(lm, "auto")


@pytest.fixture
def making(store: Path, tokenizer, bert: Path):
    """The vectors of the store's segment, of which none is made, and the file."""
    with Datastore.open(store) as datastore:
        (segment,) = datastore.snapshot.segments
        encoder, begins = load_encoder(bert), SegmentCuts(store, segment, tokenizer.decode_bytes)
        while not begins.is_complete:
            begins.build()
        yield lambda: SegmentVectors(store, segment, begins, encoder)


def whole(vectors: SegmentVectors) -> np.ndarray:
    while vectors.build(7):
        pass
    assert vectors.is_complete
    return np.array(vectors.vectors_PD)


def copied(tmp_path: Path, model_folder: Path) -> Path:
    """A datastore of texts that stand there under one to three names and two titles, and as Markdown and plain text."""
    rng, documents = np.random.default_rng(5), list[Document]()
    for number in range(12):
        lines = (" ".join(rng.choice(["memory", "gateway", "listens", "page"], 30)) for _ in range(4))
        text = f"# Part {number}\n\n" + "\n\n".join(lines)
        names = [f"{number}.md", f"{number}.md-copy.md", f"{number}.txt", f"{number}.md-third.md"]
        titles = ["one", "one", "one", "another"]
        documents += [Document(name, text, title) for name, title in zip(names, titles, strict=True)]
    documents = [documents[place] for place in rng.permutation(len(documents))]
    build_index(model_folder, documents, tmp_path / "copied", keys="none")
    return tmp_path / "copied"


@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_vectors_of_equal_texts_are_copied_and_equal_those_that_are_made(
    tmp_path, model_folder, tokenizer, bert, at_once, monkeypatch
):
    store, encoder, read = copied(tmp_path, model_folder), load_encoder(bert), list[str]()
    vectors = type(encoder).vectors
    monkeypatch.setattr(type(encoder), "vectors", lambda e, texts: read.extend(texts) or vectors(e, texts))
    with Datastore.open(store) as datastore:
        (segment,) = datastore.snapshot.segments
        places = SegmentCuts(store, segment, tokenizer.decode_bytes)
        while not places.is_complete:
            places.build()
        made = SegmentVectors(store, segment, places, encoder)
        for _ in range(3):
            made.build(at_once)
        made = SegmentVectors(store, segment, places, encoder)  # goes on after a kill
        while made.build(at_once):
            pass
        texts = places.searched_texts(range(len(places)))
        kinds = [(each.id.split("-")[0], each.title) for each in segment.documents]  # of equal text
        firsts = {kinds.index(kind) for kind in kinds}
        assert sorted(read) == sorted(texts[n] for n, row in enumerate(places.documents_P.tolist()) if row in firsts)
    assert len(firsts) == 36 < len(kinds)
    expected_PD = np.concatenate([vectors(encoder, [text]) for text in texts])
    assert made.vectors_PD.tobytes() == expected_PD.tobytes()  # whatever was read beside them


def test_documents_of_one_text_that_are_cut_in_two_ways_have_their_own_vectors(tmp_path, model_folder, tokenizer, bert):
    body = "\n\n".join(f"# Part {number}\n\n" + "memory gateway " * (number + 3) for number in range(9))
    text, store, encoder = f"---\ntags: one\n---\n{body}", tmp_path / "s", load_encoder(bert)
    documents = [Document("a.md", text, "t"), Document("b.md", text, "t", {"tags": "one"})]  # whose fields are in none
    build_index(model_folder, documents, store, keys="none")
    make_vectors(store, tokenizer, encoder)
    with Datastore.open(store) as datastore:
        (segment,) = datastore.snapshot.segments
        places = SegmentCuts(store, segment, tokenizer.decode_bytes)
        made_PD = np.array(SegmentVectors(store, segment, places, encoder).vectors_PD)
        texts, firsts = places.searched_texts(range(len(places))), int((places.documents_P == 0).sum())
    assert texts[firsts] not in (texts[0], texts[firsts - 1])
    np.testing.assert_allclose(made_PD, encoder.vectors(texts), atol=1e-6)


def test_a_maker_goes_on_behind_the_last_whole_vector(store, making):
    expected_PD = whole(making())
    (file,) = store.rglob(VECTORS)
    content, row = file.read_bytes(), 4 * expected_PD.shape[1]
    for kept in (100, HEADER_BYTES, HEADER_BYTES + 5 * row, HEADER_BYTES + 5 * row + 9, len(content)):
        file.write_bytes(content[:kept])
        begun = making()
        assert len(begun.vectors_PD) == max(0, kept - HEADER_BYTES) // row
        np.testing.assert_allclose(whole(begun), expected_PD, atol=1e-6)
    file.write_bytes(content[: HEADER_BYTES + 5 * row] + bytes(3 * row))  # a crash left three unwritten
    np.testing.assert_allclose(whole(making()), expected_PD, atol=1e-6)


def test_others_see_what_one_makes_and_do_not_make_it_too(making):
    one, other = making(), making()
    assert one.build(7)
    assert len(other.vectors_PD) == 7
    with one._growing():
        assert not other.build(7)
    assert other.build(7)
    assert len(one.vectors_PD) == 14


def test_vectors_that_a_purge_overtakes_are_not_published(store, making):
    overtaken = making()
    overtaken.build(7)
    with Datastore.open(store) as datastore:
        datastore.delete([next(datastore.snapshot.documents()).id])
    compact(store, purge=True)
    assert len(whole(overtaken)) > 20
    assert not list(store.rglob(VECTORS))


def test_a_folder_that_cannot_be_written_keeps_its_vectors_in_ram(store, making, monkeypatch):
    expected_PD = whole(making())
    (file,) = store.rglob(VECTORS)
    file.unlink()
    begun = making()
    begun.build(7)
    monkeypatch.setattr(passage_vectors, "sync", refuse)
    np.testing.assert_allclose(whole(begun), expected_PD, atol=1e-6)
    file.unlink()
    monkeypatch.setattr("memlm.index.store.derived.files.DerivedFile.begun", refuse)
    np.testing.assert_allclose(whole(making()), expected_PD, atol=1e-6)
    assert not list(store.rglob(VECTORS))


def refuse(*_):
    raise OSError(errno.ENOSPC, "no space left")


def test_what_takes_too_long_is_foretold_and_left(store, bert, tokenizer, monkeypatch):
    monkeypatch.setattr(vectors_module, "SAMPLE", 5)
    encoder, told = load_encoder(bert), []
    begun = make_vectors(store, tokenizer, encoder, within_s=0.0)
    assert (begun.made, begun.missing) == (5, begun.passages - 5)
    assert begun.missing_s > 0
    rest = make_vectors(store, tokenizer, encoder, progress=lambda phase, done, total, note="": told.append(done))
    assert (rest.made, rest.missing, rest.missing_s) == (begun.passages - 5, 0, 0.0)
    assert told[-1] == begun.passages
    assert told == sorted(told)
    with pytest.raises(Incompatible, match="another tokenizer"):
        make_vectors(store, encoder_tokenizer(), encoder)


def test_only_passages_about_the_question_are_close(model_folder, store, bert, tokenizer, monkeypatch):
    """A passage is close by its cosine, nearly by this and by many words, or where its vector is not made yet."""
    make_vectors(store, tokenizer, load_encoder(bert))
    with opened(model_folder, store, bert) as lm:
        cosines = scores_of(lm, "meaning")
        sums, most = scores_of(lm, "auto"), 1000
        asked = FindPassagesRequest(QUESTION, k=most)
        middle = sorted(cosines.values())[len(cosines) // 2]

        def close(least: float | None) -> set[tuple[str, int]]:
            monkeypatch.setattr(type(lm.engine.passage_encoder), "close_cosine", least)
            found = run_steps(lm.engine.find_passages(asked, close=True))
            return {(each.document_id, each.token_offset) for each in found}

        found = {(each.document_id, each.token_offset) for each in lm.find_passages(QUESTION, k=most)}
        assert close(None) == close(-1.0) == found
        assert close(2.0) == set()
        expected = {
            place
            for place in found
            if cosines[place] >= middle
            or (cosines[place] >= middle - NEARLY_CLOSE and sums[place] - cosines[place] >= MANY_WORDS)
        }
        assert close(middle) == expected
        assert 0 < len(expected) < len(found)
