"""Datastores without keys: no text, score or search for neighbors has anything of them but drafts."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHAPE
from running import alike, is_same_with_drafts

from memlm.api.generation import Completion, DraftSource
from memlm.api.params import GenerateRequest
from memlm.cli.store.render import SERVED_WITHOUT_KEYS, info_lines
from memlm.data.corpus import Corpus, Document, corpus_of
from memlm.data.tokenizer import Tokenizer
from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound
from memlm.evaluation import evaluate
from memlm.generation.drafts.sources import Drafter
from memlm.index.store.backup import copy_store
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived.suffixes import SUFFIXES
from memlm.indexing import text as indexing_text
from memlm.indexing.build import add_to_index, build_index, compact_index, finish_build
from memlm.indexing.estimate import estimate_build
from memlm.indexing.train_gate import train_spalm
from memlm.indexing.tune import tune
from memlm.language_model import LanguageModel
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from memlm.retrieval.store import ModelStore

PROMPT = "a model can be read, a model can"
COPIED = "copied.txt"


@pytest.fixture(scope="module")
def quantized(model_folder: Path) -> Checkpoint:
    """A model whose passes read each token alike, so that it drafts by default."""
    return load_checkpoint(model_folder, dtype="int8")


@pytest.fixture(scope="module")
def documents(quantized: Checkpoint, corpus_folder: Path) -> list[Document]:
    """Texts, one of which holds what the model writes after the prompt."""
    with LanguageModel(quantized) as lm:
        written = lm.generate(PROMPT, temperature=0, max_tokens=28, drafts=0).result().text
    files = sorted(corpus_folder.iterdir())
    return [
        *(Document(file.name, file.read_text(encoding="utf-8")) for file in files),
        Document(COPIED, PROMPT + written),
    ]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, quantized: Checkpoint, documents: list[Document]) -> Path:
    """A store that tests only read."""
    path = tmp_path_factory.mktemp("drafts") / "drafts"
    build_index(quantized, documents, path, keys="none")
    return path


@pytest.fixture
def path(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "drafts"))


def copied_tokens(completion: Completion) -> int:
    """How many tokens were accepted from the documents of datastores."""
    usage = completion.finished.usage
    return sum(each.accepted for each in usage.drafts if each.source == DraftSource.DATASTORE)


def written(lm: LanguageModel, **options: Any) -> Completion:
    return lm.generate(PROMPT, **{"temperature": 0, "max_tokens": 28, **options}).result()


@pytest.fixture
def lm(quantized: Checkpoint, path: Path) -> Iterator[LanguageModel]:
    with LanguageModel(quantized, [path]) as lm:
        yield lm


@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9}, {"temperature": 0.7, "top_p": 0.8}])
def test_a_text_is_the_same_with_and_without_the_store(quantized, built, store_folder, with_keys, options):
    keyed = [store_folder] * with_keys
    with LanguageModel(quantized, keyed) as plain, LanguageModel(quantized, [built, *keyed]) as drafting:
        for seed in range(3):
            expected = written(plain, seed=seed, drafts=0, neighbors=3, top_logprobs=3, **options)
            for drafts in (None, 0, 1, 6):
                found = written(drafting, seed=seed, drafts=drafts, neighbors=3, top_logprobs=3, **options)
                assert is_same_with_drafts(found.tokens, expected.tokens)
                assert found.accepted.store == (store_folder.name if with_keys else None)
                assert (found.accepted.k, found.accepted.lam) == (expected.accepted.k, expected.accepted.lam)
                assert found.finished.usage.searches == expected.finished.usage.searches


def test_a_text_that_the_store_holds_is_copied_from_it(lm):
    plain = written(lm, drafts=0)
    found = written(lm, drafts=6)
    assert copied_tokens(found) >= 10
    assert found.finished.usage.steps < plain.finished.usage.steps - 10
    assert found.finished.usage.searches == 0


def test_a_deleted_or_excluded_document_gives_no_draft(lm):
    assert copied_tokens(written(lm, drafts=6)) >= 10
    others = [document.id for document in lm.engine.stores.model_store().snapshot.documents()][:-1]
    assert copied_tokens(written(lm, drafts=6, exclude_documents=(COPIED, *others))) == 0
    assert copied_tokens(written(lm, drafts=6, exclude_documents=others)) >= 10
    with pytest.raises(NotFound, match="nowhere"):
        written(lm, exclude_documents=("nowhere",))
    lm.delete_documents(others)
    assert copied_tokens(written(lm, drafts=6)) >= 10
    lm.delete_documents([COPIED])
    assert copied_tokens(written(lm, drafts=6)) == 0


def test_a_deletion_reaches_a_text_that_is_being_written(lm):
    tokens = lm.engine.stores.model_store().snapshot.tokens(COPIED).tolist()
    context = tokens[:20]
    drafter = Drafter(context, retriever=lm.engine.stores.shared_retriever(GenerateRequest.of("a", {}).retrieval))

    def drafts() -> dict[DraftSource, list[int]]:
        return {draft.source: list(draft.token_ids) for draft in drafter.drafts(4)}

    assert drafts()[DraftSource.DATASTORE] == tokens[20:24]
    context.append(tokens[20])
    drafter.append(tokens[20], None)
    assert drafts()[DraftSource.DATASTORE] == tokens[21:25]
    lm.delete_documents([COPIED])
    assert drafts().get(DraftSource.DATASTORE) != tokens[21:25]


def test_a_store_serves_every_model_of_its_tokenizer_alone(tokenizer, path, store_folder, corpus_folder, tmp_path):
    decoder = Decoder(ModelConfig(vocab_size=tokenizer.vocab_size, **SHAPE))
    save_checkpoint(tmp_path / "other", decoder, tokenizer)
    with LanguageModel(load_checkpoint(tmp_path / "other"), [path]) as lm:
        assert alike(written(lm, drafts=4).tokens, written(lm, drafts=0, use_store=False).tokens)
        with pytest.raises(Incompatible, match="built by another model"):
            lm.load_datastore(store_folder)
        add_to_index(lm.checkpoint, [Document("more.txt", "more text")], path)
    strange = Tokenizer.train((document.text for document in Corpus([corpus_folder])), vocab_size=280)
    save_checkpoint(tmp_path / "strange", Decoder(ModelConfig(vocab_size=strange.vocab_size, **SHAPE)), strange)
    with pytest.raises(Incompatible, match="another tokenizer"):
        LanguageModel(load_checkpoint(tmp_path / "strange"), [path])


def test_what_needs_keys_says_so(lm, path, quantized, corpus_folder, documents):
    without = "'drafts' has no keys yet, .*memlm index keys drafts.* Answers, passages"
    with pytest.raises(Incompatible, match=without):
        lm.search("drafts", "the memory")
    with pytest.raises(Incompatible, match=without):
        lm.search(None, "the memory")
    for work in (
        lambda: tune(quantized, path, Corpus([corpus_folder])),
        lambda: train_spalm(quantized, path, Corpus([corpus_folder])),
        lambda: lm.engine.stores.model_store().snapshot.search(np.zeros((1, 32), np.float32), 1),
        lambda: lm.engine.stores.model_store().snapshot.exact().search(np.zeros((1, 32), np.float32), 1),
        lambda: lm.engine.stores.model_store().snapshot.keys(np.array([1 << 40])),
    ):
        with pytest.raises(Incompatible, match=r"has no keys yet, .* Answers, passages, search by words"):
            work()
    for name, value in (("k", 4), ("lam", 0.5), ("knn_temperature", 1.0), ("spalm", True)):
        with pytest.raises(InvalidInput, match=f"{name} is set, but no datastore is searched"):
            written(lm, **{name: value})
    with pytest.raises(InvalidInput, match="'drafts' has no keys, so it is not mixed in and has no weight"):
        written(lm, stores={"drafts": 2.0})
    assert written(lm, stores={"drafts": 1.0}).text


def test_texts_are_scored_by_the_model_alone(lm, quantized, corpus_folder):
    corpus = Corpus([corpus_folder / "doc-3.txt"])
    with LanguageModel(quantized) as plain:
        for text in ("the memory of a model", PROMPT):
            assert lm.score(text) == plain.score(text)
            assert lm.loglikelihood(text, " and more") == plain.loglikelihood(text, " and more")
        assert evaluate(lm, corpus) == evaluate(plain, corpus)


def test_words_and_copied_passages_are_found(lm, documents):
    by_words = lm.search(None, "model can be read", by="words", k=3)
    assert COPIED in {neighbor.document_id for neighbor in by_words}
    (span,) = lm.trace(documents[-1].text).spans
    assert (span.text, [place.document_id for place in span.places]) == (documents[-1].text, [COPIED])


def test_a_store_has_its_tokens_and_no_keys(path, quantized, documents):
    with Datastore.open(path) as store:
        snapshot, (record,) = store.snapshot, store.manifest.segments
        assert set(record.files) == {"values.npy", "starts.npy", "documents.sqlite", SUFFIXES}
        for document in documents:
            assert snapshot.tokens(document.id).tolist() == quantized.tokenizer.encode(document.text).tolist()
        assert (snapshot.index_kind, snapshot.distances, snapshot.is_keyed, snapshot.has_keys) == (
            "none",
            "none",
            False,
            False,
        )
        shown = dict(info_lines(snapshot))
        assert shown["keys"].startswith(f"none: {SERVED_WITHOUT_KEYS}")
        assert not {"quality", "defaults", "tuned"} & set(shown)
        assert snapshot.verify() == []
    assert not finish_build(path, quantized)
    info = ModelStore.open(path, quantized).info()
    assert (info.num_keyed_entries, info.index, info.lam, info.k) == (0, "none", 0.0, 0)
    estimate = estimate_build(quantized, corpus_of(documents), path / "new", keys=False)
    assert estimate.disk_bytes < 12 * estimate.entries + 400 * len(documents)
    assert (estimate.index, estimate.tokens_per_s, estimate.seconds) == ("none", None, None)


@pytest.mark.parametrize("name", ["values.npy", SUFFIXES, "documents.sqlite"])
def test_damage_is_found(path, name, monkeypatch):
    file = path / "segments" / "000001" / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(Corrupt, match=f"{name} was changed"):
        Datastore.open(path)  # opening reads small files whole
    monkeypatch.setattr("memlm.index.store.segment.SMALL_BYTES", 0)
    with Datastore.open(path) as store:
        (problem,) = store.snapshot.verify()
    assert f"{name} was changed" in problem
    file.unlink()
    with pytest.raises(Corrupt, match=f"{name} is missing"):
        Datastore.open(path)


def test_added_replaced_and_compacted_documents_give_drafts(quantized, documents, tmp_path):
    path, others = tmp_path / "drafts", documents[:-1]
    build_index(quantized, others, path, keys="none")
    with LanguageModel(quantized, [path]) as lm:
        assert copied_tokens(written(lm, drafts=6)) < 10
        add_to_index(quantized, documents[-1:], path)
        lm.refresh()
        assert copied_tokens(written(lm, drafts=6)) >= 10
        add_to_index(quantized, [Document("doc-0.txt", "new text")], path, replace=True)
        lm.delete_documents(["doc-1.txt", "doc-2.txt"])
        done = compact_index(path, quantized, purge=True)
        assert (done.segments_before, done.deleted_documents) == (3, 3)
        lm.refresh()
        assert copied_tokens(written(lm, drafts=6)) >= 10
    with Datastore.open(path) as store:
        live = {document.id: document.text for document in others[3:]}
        live |= {COPIED: documents[-1].text, "doc-0.txt": "new text"}
        assert [document.id for document in store.snapshot.documents()] == list(live)
        for name, text in live.items():
            assert store.snapshot.tokens(name).tolist() == quantized.tokenizer.encode(text).tolist()
        assert store.snapshot.verify() == []
        store.delete(list(live))
    compact_index(path)
    with LanguageModel(quantized, [path]) as lm:  # of no segment
        assert copied_tokens(written(lm, drafts=6)) == 0
        assert lm.get_datastore().index == "none"


def test_a_copy_gives_drafts_too(quantized, built, tmp_path):
    copy_store(built, tmp_path / "copy", hard_links=False)
    with LanguageModel(quantized, [tmp_path / "copy"]) as lm:
        assert copied_tokens(written(lm, drafts=6)) >= 10


def test_a_killed_build_goes_on(quantized, documents, built, tmp_path, monkeypatch):
    monkeypatch.setattr(indexing_text, "CHECKPOINT_TOKENS", 2)
    monkeypatch.setattr(indexing_text, "AT_ONCE_DOCUMENTS", 2)

    class Killed(Exception):
        """Stands for a kill in the middle of a build."""

    def kill(phase: str, done: int, total: int | None, note: str = "") -> None:
        if phase == "read" and done > (total or 0) / 2:
            raise Killed

    with pytest.raises(Killed):
        build_index(quantized, documents, tmp_path / "cut", keys="none", progress=kill)
    report = build_index(quantized, documents, tmp_path / "cut", keys="none")
    assert 0 < report.resumed_entries < report.entries
    for name in ("values.npy", SUFFIXES):
        one, other = (folder / "segments" / "000001" / name for folder in (tmp_path / "cut", built))
        assert one.read_bytes() == other.read_bytes()
