"""An encoder's vectors rank passages in place of the model's keys, and are made once."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from encoders import save_bert
from typer.testing import CliRunner

from memlm.cli.app import app
from memlm.data.corpus import Corpus
from memlm.errors import Incompatible, InvalidInput
from memlm.index.store.derived import cuts, passage_vectors
from memlm.index.store.manifest import PASSAGES, VECTORS
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel, load
from memlm.model.files.encoder_files import load_encoder
from memlm.retrieval.passage_search import fused

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


def order(lm: LanguageModel, by: str) -> list[tuple[str, int]]:
    return [(each.document_id, each.token_offset) for each in lm.find_passages(QUESTION, by=by, k=1000)]


def test_by_meaning_they_are_ranked_by_the_cosine_of_their_vectors(model_folder, store, bert):
    encoder = load_encoder(bert)
    with opened(model_folder, store, bert) as lm:
        found = lm.find_passages(QUESTION, by="meaning", k=1000)
        everything = lm.find_passages("the page", by="words", k=1000)
    question_D = encoder.vectors([QUESTION])[0]
    for each in found:
        assert each.score == pytest.approx(
            float(encoder.vectors([f"{each.title}\n{each.text}"])[0] @ question_D), abs=1e-5
        )
    scores = [each.score for each in found]
    assert scores == sorted(scores, reverse=True)
    assert {each.document_id for each in found} >= {each.document_id for each in everything}
    assert len(found) >= len(everything) > 20


def test_both_joins_words_and_vectors_and_words_need_no_encoder(model_folder, store, bert):
    with opened(model_folder, store, bert) as lm:
        words = order(lm, "words")
        assert not list(store.rglob(VECTORS))
        meaning, both = order(lm, "meaning"), order(lm, "both")
    places = {place: number for number, place in enumerate(meaning)}
    orders = [np.array([places[each] for each in words]), np.arange(len(meaning))]
    scores = fused(orders, len(meaning))
    assert sorted(-scores) == [-scores[places[each]] for each in both]
    with opened(model_folder, store, None) as lm:
        assert order(lm, "words") == words
        assert order(lm, "meaning") != meaning


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


def test_an_encoder_for_a_search_by_words_is_refused(store, bert, model_folder):
    command = ["index", "passages", str(store), QUESTION, "--model", str(model_folder), "--encoder", str(bert)]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, InvalidInput)
    assert result.exception.field == "by"
    result = CliRunner().invoke(app, [*command, "--by", "meaning", "--json"])
    assert result.exit_code == 0, result.output


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
        assert order(lm, "both")
    with opened(model_folder, tmp_path / "drafts", None) as lm, pytest.raises(Incompatible):
        order(lm, "meaning")
