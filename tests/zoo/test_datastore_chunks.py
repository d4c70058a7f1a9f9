"""RETRO's neighbors from a datastore, in Python and by command: against the same documents in memory."""

import json
import shutil
import sqlite3
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_runs import TINY, Killed, kill_at
from typer.testing import CliRunner

from memlm.api.generation import Completion
from memlm.cli.app import app
from memlm.data.corpus import Corpus
from memlm.data.tokenizer import Tokenizer
from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived import chunk_vectors
from memlm.index.store.exclusion import search_views
from memlm.index.store.manifest import CHUNKS
from memlm.indexing.build import build_index
from memlm.language_model import load
from memlm.model import Decoder
from memlm.model.files.checkpoint import load_checkpoint
from memlm.server.config import ServerConfig
from memlm.server.inference.startup import _load_model
from memlm.training.train import train
from memlm.zoo.retro.chunk_store import ChunkStore, TokenMeans
from memlm.zoo.retro.datastore_chunks import DatastoreChunks, read_chunks
from memlm.zoo.retro.encoder import NOTHING

CHUNK = 8
RETRO = {"kind": "retro", "chunk": CHUNK, "neighbors": 2, "length": 12, "encoder_layers": 1}
TRAINING = replace(TINY, steps=6, checkpoint_every=2, context_length=48, dtype="float32", model_fields={"cross": RETRO})


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of a segment are made in many steps."""
    monkeypatch.setattr(chunk_vectors, "CHUNKS_AT_ONCE", 7)


@pytest.fixture
def store(tmp_path: Path, model_folder: Path, corpus_folder: Path) -> Path:
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "store", keys="none")
    return tmp_path / "store"


@pytest.fixture(scope="module")
def retro_folder(tmp_path_factory, model_folder: Path, corpus_folder: Path) -> Path:
    """The tiny model with a retrieval whose last projections are not zero."""
    folder = tmp_path_factory.mktemp("retro")
    build_index(model_folder, Corpus([corpus_folder]), folder / "store", keys="none")
    settings = replace(TRAINING, chunk_store=str(folder / "store"), steps=20, learning_rate=0.05, batch_size=2)
    train(Corpus([corpus_folder]), folder / "model", settings, init_from=model_folder)
    return folder / "model"


def documents_of(store: Path) -> dict[str, list[int]]:
    with Datastore.open(store) as datastore:
        snapshot = datastore.snapshot
        return {each.id: snapshot.tokens(each.id).tolist() for each in snapshot.documents()}


def some_chunks(store: Path, count: int = 12) -> torch.Tensor:
    generator, texts = np.random.default_rng(3), list(documents_of(store).values())
    chosen = [texts[number] for number in generator.integers(len(texts), size=count)]
    begins = [int(generator.integers(len(text) - CHUNK)) for text in chosen]
    return torch.tensor([text[begin : begin + CHUNK] for text, begin in zip(chosen, begins, strict=True)])


def in_memory(store: Path, decoder: Decoder, *, leaves_out_own: bool = False) -> ChunkStore:
    return ChunkStore(
        list(documents_of(store).values()), TokenMeans(decoder), chunk=CHUNK, neighbors=2, length=12,
        leaves_out_own=leaves_out_own,
    )  # fmt: skip


@pytest.mark.parametrize("leaves_out_own", [False, True])
def test_it_finds_what_the_documents_in_memory_have_through_additions_and_deletions(
    store, model_folder, retro_folder, leaves_out_own
):
    checkpoint = load_checkpoint(retro_folder)
    asked = some_chunks(store)
    with (
        load(model_folder, [store]) as lm,
        DatastoreChunks(store, checkpoint.decoder, checkpoint.tokenizer, leaves_out_own=leaves_out_own) as chunks,
    ):

        def check() -> None:
            expected = in_memory(store, checkpoint.decoder, leaves_out_own=leaves_out_own)
            assert torch.equal(chunks(asked), expected(asked))
            assert chunks.num_chunks == expected.num_chunks

        check()
        (file,) = store.rglob(CHUNKS)
        before = file.read_bytes()
        lm.delete_documents(["doc-7.txt"])
        check()
        lm.remember("the page of the memory", document_id="note")
        check()
        assert file.read_bytes() == before
        assert len(list(store.rglob(CHUNKS))) == 2
        lm.delete_documents(list(documents_of(store)))
        assert (chunks(asked) == NOTHING).all()


def test_each_chunk_has_the_vector_of_its_own_tokens(store, retro_folder):
    embed = TokenMeans(load_checkpoint(retro_folder).decoder)
    with Datastore.open(store) as datastore:
        (segment,) = datastore.snapshot.segments
        chunks = chunk_vectors.SegmentChunks(store, segment, CHUNK, embed)
        while not chunks.is_complete:
            chunks.build()
        expected = [
            embed(np.array([text[begin : begin + CHUNK]]))[0]
            for text in documents_of(store).values()
            for begin in range(0, len(text), CHUNK)
        ]
        assert any(len(text) % CHUNK for text in documents_of(store).values())
        np.testing.assert_allclose(chunks.vectors_PE, expected, rtol=1e-6)
        chunks.close()


def test_vectors_are_made_once_and_anew_for_another_embedding(store, retro_folder, monkeypatch):
    checkpoint, asked = load_checkpoint(retro_folder), some_chunks(store)

    def found() -> torch.Tensor:
        with DatastoreChunks(store, checkpoint.decoder, checkpoint.tokenizer) as chunks:
            return chunks(asked)

    first = found()
    (file,) = store.rglob(CHUNKS)
    content = file.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(chunk_vectors.SegmentChunks, "_add", None)  # nothing is computed
        assert torch.equal(found(), first)
    file.write_bytes(b"no database" * 500)
    assert torch.equal(found(), first)
    assert file.read_bytes() == content
    other = Decoder(checkpoint.decoder.config)
    with DatastoreChunks(store, other, checkpoint.tokenizer) as chunks:
        assert torch.equal(chunks(asked), in_memory(store, other)(asked))
    assert file.read_bytes() != content


@pytest.mark.parametrize(
    "damage", ["delete from vectors where chunk = 3", "update vectors set vector = x'0102' where chunk = 3"]
)
def test_a_file_without_some_vectors_is_refused_by_name(store, retro_folder, damage):
    checkpoint = load_checkpoint(retro_folder)
    DatastoreChunks(store, checkpoint.decoder, checkpoint.tokenizer).close()
    (file,) = store.rglob(CHUNKS)
    with sqlite3.connect(file) as base:
        base.execute(damage)
    with pytest.raises(Corrupt, match=r"chunks\.sqlite is damaged .* remove it"):
        DatastoreChunks(store, checkpoint.decoder, checkpoint.tokenizer)
    file.unlink()
    DatastoreChunks(store, checkpoint.decoder, checkpoint.tokenizer).close()


def test_where_the_folder_cannot_be_written_nothing_is_left(store, retro_folder, monkeypatch):
    checkpoint, asked = load_checkpoint(retro_folder), some_chunks(store)
    monkeypatch.setattr(
        "memlm.index.store.derived.files.commit_lock", lambda path: (_ for _ in ()).throw(OSError("full"))
    )
    with DatastoreChunks(store, checkpoint.decoder, checkpoint.tokenizer) as chunks:
        assert torch.equal(chunks(asked), in_memory(store, checkpoint.decoder)(asked))
    assert not list(store.rglob("*chunks*"))


def test_a_purge_leaves_no_vectors_of_a_deleted_document(store, retro_folder):
    checkpoint = load_checkpoint(retro_folder)
    DatastoreChunks(store, checkpoint.decoder, checkpoint.tokenizer).close()
    assert list(store.rglob(CHUNKS))
    with Datastore.open(store) as datastore:
        datastore.delete(["doc-3.txt"])
    compact(store, purge=True)
    assert not list(store.rglob(CHUNKS))


def test_training_reads_no_neighbor_of_the_document_that_it_learns_from(
    store, model_folder, corpus_folder, tmp_path, monkeypatch
):
    asked, found, search = list[list[int]](), list[list[list[int]]](), DatastoreChunks.__call__

    def spied(self, chunk_Nm):
        result = search(self, chunk_Nm)
        asked.extend(chunk_Nm.tolist())
        found.extend(result.tolist())
        return result

    monkeypatch.setattr(DatastoreChunks, "__call__", spied)
    settings = replace(TRAINING, chunk_store=str(store))
    train(Corpus([corpus_folder]), tmp_path / "m", settings, init_from=model_folder, valid=Corpus([corpus_folder]))
    texts, start = list(documents_of(store).values()), load_checkpoint(model_folder).tokenizer.start_id

    def have(run: list[int]) -> set[int]:
        size = len(run)
        return {
            number
            for number, text in enumerate(texts)
            if any(text[place : place + size] == run for place in range(len(text) - size + 1))
        }

    num_found = 0
    for chunk, neighbors in zip(asked, found, strict=True):
        own = have(chunk[1:] if chunk[0] == start else chunk)
        assert own, "a chunk crosses documents"
        for neighbor in neighbors:
            text = [token for token in neighbor if token != NOTHING]
            num_found += bool(text)
            assert not text or have(text) - own
    assert num_found > len(asked)


def test_a_base_learns_to_read_alone_and_reads_nothing_without_a_store(
    store, model_folder, retro_folder, corpus_folder
):
    base, fitted = load_checkpoint(model_folder).decoder.weights(), load_checkpoint(retro_folder).decoder.weights()
    assert all(torch.equal(fitted[name], weight) for name, weight in base.items())
    assert fitted.keys() - base.keys()
    assert all("cross." in name for name in fitted.keys() - base.keys())
    text = (corpus_folder / "doc-5.txt").read_text()
    with load(model_folder) as plain, load(retro_folder) as retro:
        alone = retro.score(text).base.nll
        assert alone == plain.score(text).base.nll
        with read_chunks(retro, store):
            assert retro.score(text).base.nll != alone


def test_a_resumed_run_reads_the_same_neighbors(store, model_folder, corpus_folder, tmp_path):
    corpus, settings = Corpus([corpus_folder]), replace(TRAINING, chunk_store=str(store), learning_rate=0.05)
    whole = train(corpus, tmp_path / "whole", settings, init_from=model_folder)
    with pytest.raises(Killed):
        train(corpus, tmp_path / "killed", settings, init_from=model_folder, progress=kill_at(3))
    assert train(corpus, tmp_path / "killed", resume=True).losses == whole.losses
    without = replace(settings, seed=1)
    assert train(corpus, tmp_path / "other", without, init_from=model_folder).losses != whole.losses


def test_a_model_that_is_new_learns_with_the_tokenizer_of_the_store(store, corpus_folder, tmp_path, model_folder):
    settings, tokenizer = replace(TRAINING, chunk_store=str(store), batch_size=2), Tokenizer.load(model_folder)
    report = train(Corpus([corpus_folder]), tmp_path / "m", settings, tokenizer=tokenizer)
    assert report.steps == 6
    with load(tmp_path / "m") as lm, read_chunks(lm, store):
        assert len(lm.generate("the page", max_tokens=12, temperature=0).result().tokens) == 12


def ids_of(completion: Completion) -> list[int]:
    return [token.id for token in completion.tokens]


def test_drafts_sessions_and_batches_give_the_same_text(store, retro_folder):
    prompt, options = "the page of the memory of the model and the text", {"max_tokens": 24, "temperature": 0}
    with load(retro_folder) as lm, ExitStack() as held:
        plain = ids_of(lm.generate(prompt, drafts=0, **options).result())
        held.enter_context(read_chunks(lm, store))
        alone = ids_of(lm.generate(prompt, drafts=0, **options).result())
        assert alone != plain
        drafted = lm.generate(prompt, drafts=4, draft=lm.detokenize(alone), **options).result()
        assert ids_of(drafted) == alone
        assert [ids_of(each) for each in lm.generate_batch([prompt, "a", prompt], **options)][::2] == [alone] * 2
        session = lm.session()
        session.append(prompt[:20])
        session.append(prompt[20:])
        forked = lm.fork_session(session.name).name
        expected = ids_of(lm.generate("", session=session.name, drafts=0, **options).result())
        assert ids_of(lm.generate("", session=forked, drafts=4, **options).result()) == expected


def test_a_model_that_the_command_trained_reads_its_store(store, model_folder, corpus_folder, tmp_path):
    def run(*command: object) -> str:
        result = CliRunner().invoke(app, [str(each) for each in command])
        assert result.exit_code == 0, result.output
        return result.output

    (tmp_path / "retro.toml").write_text(
        f'chunk_store = "{store}"\nlearning_rate = 0.05\n\n[model.cross]\n'
        + "\n".join(f"{name} = {json.dumps(value)}" for name, value in RETRO.items())
    )
    model = tmp_path / "retro"
    run(
        "train", corpus_folder, "--init-from", model_folder, "--config", tmp_path / "retro.toml", "--steps", 8,
        "--out", model,
    )  # fmt: skip
    text = (corpus_folder / "doc-5.txt").read_text()
    with load(model) as lm:
        alone = lm.score(text).bits_per_byte
        with read_chunks(lm, store):
            assert lm.score(text).bits_per_byte != alone
        assert lm.score(text).bits_per_byte == alone


def test_what_has_no_meaning_is_refused(store, store_folder, model_folder, retro_folder, corpus_folder, tmp_path):
    corpus, plain = Corpus([corpus_folder]), replace(TRAINING, model_fields={})
    with_store, out = replace(TRAINING, chunk_store=str(store)), tmp_path / "m"
    with pytest.raises(InvalidInput, match="as chunk_store"):
        train(corpus, out, TRAINING, init_from=model_folder)
    with pytest.raises(InvalidInput, match="this model has none"):
        train(corpus, out, replace(plain, chunk_store=str(store)), init_from=model_folder)
    with pytest.raises(InvalidInput, match="--tokenizer"):
        train(corpus, out, with_store)
    other = Tokenizer.train(["other texts, other tokens"], vocab_size=260)
    seen = list[str]()
    with pytest.raises(Incompatible, match="another tokenizer"):
        train(corpus, out, with_store, tokenizer=other, progress=lambda phase, *_: seen.append(phase))
    nowhere = replace(with_store, chunk_store=str(tmp_path / "nowhere"))
    with pytest.raises(NotFound, match="nowhere"):
        train(corpus, out, nowhere, init_from=model_folder, progress=lambda phase, *_: seen.append(phase))
    assert not out.exists()
    assert not seen  # the corpus is not tokenized first
    changed = replace(with_store, model_fields={"cross": {**RETRO, "chunk": 4}})
    with pytest.raises(InvalidInput, match="cannot change"):
        train(corpus, out, changed, init_from=retro_folder)
    assert not out.exists()
    with load(model_folder) as lm, pytest.raises(InvalidInput, match="cross retro"):
        read_chunks(lm, store)
    build_index(retro_folder, corpus, tmp_path / "keyed", check="none")
    with load(retro_folder, [tmp_path / "keyed"]) as lm, pytest.raises(InvalidInput, match="leave out either"):
        read_chunks(lm, store)
    with load(retro_folder, [store]) as lm, read_chunks(lm, store):  # loaded for drafts only
        with pytest.raises(InvalidInput, match="leave out either"):
            lm.load_datastore(tmp_path / "keyed")
        assert [each.name for each in lm.stores] == [store.name]
    with pytest.raises(Incompatible, match="a server gives it none"):
        _load_model(
            ServerConfig(model=retro_folder), {}, 0, may_fail=(), on_lost=lambda store, ids: None, search=search_views
        )
    shutil.copytree(store, tmp_path / "empty")
    with Datastore.open(tmp_path / "empty") as datastore:
        datastore.delete(list(documents_of(tmp_path / "empty")))
    with load(retro_folder) as lm, pytest.raises(InvalidInput, match="no documents"):
        read_chunks(lm, tmp_path / "empty")
