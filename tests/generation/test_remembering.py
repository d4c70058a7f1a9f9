"""Texts that are remembered at once equal those that are added: the same entries, and the same answers."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from batch_helpers import KINDS
from conftest import SHAPE
from texts import make_text

from memlm.api.datastores import MAX_REMEMBERED, MAX_REMEMBERED_CHARACTERS, NewDocument, RememberRequest, text_id
from memlm.data.corpus import Corpus, Document
from memlm.errors import AlreadyExists, InvalidInput, NotFound
from memlm.indexing.build import add_to_index, build_index
from memlm.language_model import LanguageModel
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint

SHORT, LONG = "the gateway listens on port 7443", make_text(77, 900)


def open_copy(store: Path, model: Path, folder: Path) -> LanguageModel:
    shutil.copytree(store, folder)
    return LanguageModel(load_checkpoint(model), [folder])


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 24, "stride": 8}, {"prune": 0.02}, {"keys": "none"}],
    ids=["default", "small windows", "pruned", "without keys"],
)
def test_a_remembered_text_has_the_entries_of_an_added_one(checkpoint, corpus_folder, tmp_path, options):
    corpus, texts = Corpus([corpus_folder / "doc-1.txt"]), {"short": SHORT, "long": LONG}
    for name in ("added", "remembered"):
        build_index(checkpoint, corpus, tmp_path / name, check="none", **options)
    new = Corpus([Document(name, text) for name, text in texts.items()])
    add_to_index(checkpoint, new, tmp_path / "added", check="none")
    with LanguageModel(checkpoint, [tmp_path / "added", tmp_path / "remembered"]) as lm:
        report = lm.remember([NewDocument(name, text) for name, text in texts.items()], store="remembered")
        assert report.document_ids == ("short", "long")
        added, remembered = (lm.engine.stores.model_store(name).snapshot for name in ("added", "remembered"))
        assert report.num_entries == added.manifest.segments[1].entries
        for name in texts:
            assert remembered.tokens(name).tolist() == added.tokens(name).tolist()
        if added.has_keys:
            keys = [view.segments[1].stored_keys().astype(np.float32) for view in (added, remembered)]
            np.testing.assert_allclose(*keys, atol=2e-3, rtol=2e-3)  # float16, from passes of other lengths
        if "prune" in options:
            assert remembered.num_pruned_entries == added.num_pruned_entries > 0


@pytest.mark.parametrize("kind", ["xl", "compressive"])
def test_a_model_with_memory_reads_a_remembered_text_segment_by_segment(tokenizer, corpus_folder, tmp_path, kind):
    config = ModelConfig.from_dict({**SHAPE, **KINDS[kind], "vocab_size": tokenizer.vocab_size})
    save_checkpoint(tmp_path / "model", Decoder(config), tokenizer)
    checkpoint = load_checkpoint(tmp_path / "model")
    for name in ("added", "remembered"):
        build_index(checkpoint, Corpus([corpus_folder / "doc-1.txt"]), tmp_path / name, check="none")
    add_to_index(checkpoint, Corpus([Document("long", LONG)]), tmp_path / "added", check="none")
    with LanguageModel(checkpoint, [tmp_path / "added", tmp_path / "remembered"]) as lm:
        lm.remember(LONG, store="remembered")
        keys = [store.opened.snapshot.segments[1].stored_keys() for store in lm.engine.stores]
    np.testing.assert_allclose(*keys, atol=2e-3, rtol=2e-3)


def test_answers_use_a_text_from_the_call_on_and_tell_its_place(store_folder, model_folder, tmp_path):
    options = {"k": 4, "lam": 0.9, "knn_temperature": 0.05, "max_tokens": 5, "temperature": 0, "neighbors": 1}
    prompt, rest = SHORT.rsplit(" ", 1)
    with open_copy(store_folder, model_folder, tmp_path / "store") as lm:
        lm.remember(SHORT, title="Gateway", metadata={"kind": "note"})
        answer = lm.generate(prompt, **options).result()
        neighbor = answer.tokens[0].neighbors[0]
        assert answer.text.strip().startswith(rest)
        assert (neighbor.document_id, neighbor.title, neighbor.metadata) == (
            text_id(SHORT),
            "Gateway",
            {"kind": "note"},
        )
        lm.delete_documents([text_id(SHORT)])
        assert text_id(SHORT) not in {each.document_id for each in lm.search("store", prompt, k=64)}


def test_a_text_is_remembered_once_or_replaced(store_folder, model_folder, tmp_path):
    with open_copy(store_folder, model_folder, tmp_path / "store") as lm:
        entries = lm.remember(SHORT).num_entries
        before = lm.get_datastore()
        with pytest.raises(AlreadyExists, match="replace it"):
            lm.remember(SHORT)
        assert lm.get_datastore() == before
        lm.remember(SHORT + " and 8443", document_id=text_id(SHORT), replace=True)
        after = lm.get_datastore()
        assert after.num_documents == before.num_documents
        assert after.num_entries > before.num_entries >= entries
        with pytest.raises(NotFound, match="no datastore 'nowhere'"):
            lm.remember("a", store="nowhere")


def test_many_texts_stay_in_few_segments(store_folder, model_folder, tmp_path):
    with open_copy(store_folder, model_folder, tmp_path / "store") as lm:
        for number in range(30):
            lm.remember(f"note {number}: the gateway {number} listens")
        snapshot = lm.engine.stores.model_store().snapshot
        assert len(snapshot.manifest.segments) <= 8
        assert snapshot.num_documents == 8 + 30
        assert snapshot.verify() == []


@pytest.mark.parametrize(
    ("documents", "match"),
    [
        ((), "expected 1 to"),
        (tuple(NewDocument(str(n), "a") for n in range(MAX_REMEMBERED + 1)), "1,001 documents"),
        ((NewDocument("a", "a" * (MAX_REMEMBERED_CHARACTERS + 1)),), "add larger ones by AddDocuments"),
        ((NewDocument("a", "a"), NewDocument("a", "b", continues=True)), "send each document whole"),
    ],
)
def test_what_is_not_to_be_remembered_at_once_is_refused(documents, match):
    with pytest.raises(InvalidInput, match=match):
        RememberRequest(documents)


def test_the_fields_of_a_text_do_not_go_with_documents():
    with pytest.raises(InvalidInput, match="documents have their own"):
        RememberRequest.of([NewDocument("a", "a")], None, title="A")


@pytest.mark.parametrize(
    "given", [[("a", "text")], [{"id": "a", "text": "b"}], [Document("a", "text")], ["text"], [None]]
)
def test_what_is_no_document_is_refused_by_its_type(given):
    with pytest.raises(InvalidInput, match=r"of the type \w+; expected NewDocument") as refused:
        RememberRequest.of(given, None)
    assert refused.value.field == "documents"
