"""Datastores in service whose folders change: replaced, rolled back, of another model, broken, and sound again."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import SHAPE
from texts import make_text

from memlm.base.files import checksum_of, read_signed, sign
from memlm.data.corpus import Corpus
from memlm.data.tokenizer import Tokenizer
from memlm.errors import AlreadyExists, Corrupt, Incompatible, MemlmError, NotFound, Unavailable
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import read_manifest
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint

PROMPT = make_text(3, 8)


@pytest.fixture(scope="session")
def other_store(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """Another store of the same model, and of the same manifest's number."""
    corpus = tmp_path_factory.mktemp("folder") / "other"
    corpus.mkdir()
    for number in range(3):
        (corpus / f"other-{number}.txt").write_text(make_text(100 + number, 60), encoding="utf-8")
    build_index(model_folder, Corpus([corpus]), corpus.with_name("other-store"), check="none")
    return corpus.with_name("other-store")


@pytest.fixture(scope="session")
def strange_store(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, corpus_folder: Path) -> Path:
    """A store of another model with the same tokenizer."""
    folder = tmp_path_factory.mktemp("strange")
    torch.manual_seed(1)
    save_checkpoint(folder / "model", Decoder(ModelConfig(vocab_size=tokenizer.vocab_size, **SHAPE)), tokenizer)
    build_index(folder / "model", Corpus([corpus_folder]), folder / "store")
    return folder / "store"


@pytest.fixture
def live(store_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store_folder, tmp_path / "live"))


@pytest.fixture
def pair(model_folder: Path, store_folder: Path, live: Path) -> Iterator[LanguageModel]:
    """A model with a store whose folder changes, and one whose folder stays."""
    with LanguageModel(load_checkpoint(model_folder), {"live": live, "steady": store_folder}) as lm:
        yield lm


def put(store: Path, live: Path) -> None:
    """`mv live old; cp -r store live`."""
    if live.exists():
        shutil.rmtree(live.with_name("old"), ignore_errors=True)
        live.rename(live.with_name("old"))
    shutil.copytree(store, live)


def documents(lm: LanguageModel, name: str | None = None) -> set[str]:
    return {neighbor.document_id for neighbor in lm.search(name, PROMPT, k=4000)}


def of_a_newer_version(path: Path) -> None:
    manifest = read_manifest(path)
    body = {**read_signed((path / manifest.name).read_bytes()), "shards": 4}
    (path / manifest.name).write_bytes(sign(body))
    (path / "CURRENT").write_text(
        f"{manifest.name} {checksum_of((path / manifest.name).read_bytes())} {manifest.store_id}\n"
    )


def without_current(path: Path) -> None:
    (path / "CURRENT").unlink()


def without_values(path: Path) -> None:
    (path / "segments" / "000002" / "values.npy").unlink()
    with_another_number(path)


def with_another_number(path: Path) -> None:
    """A commit that another process has made."""
    manifest = read_manifest(path)
    body = {**read_signed((path / manifest.name).read_bytes()), "number": 9}
    (path / "manifest-000009.json").write_bytes(sign(body))
    (path / "CURRENT").write_text(f"manifest-000009.json {checksum_of(sign(body))} {manifest.store_id}\n")


def gone(path: Path) -> None:
    shutil.rmtree(path)


BROKEN: list[tuple[Callable[[Path], None], type[MemlmError], str]] = [
    (of_a_newer_version, Incompatible, "shards"),
    (without_current, Corrupt, "CURRENT"),
    (without_values, Corrupt, r"values\.npy"),
    (gone, Unavailable, "no datastore at"),
]


def test_a_store_follows_its_folder(pair: LanguageModel, live: Path, other_store: Path) -> None:
    before = pair.get_datastore("live")
    put(other_store, live)
    assert pair.refresh()
    assert not pair.refresh()
    after = pair.get_datastore("live")
    assert after.manifest == before.manifest
    assert after.store_id != before.store_id
    assert after.problem == ""
    assert documents(pair, "live") == {f"other-{number}.txt" for number in range(3)}
    with pytest.raises(NotFound, match="doc-1"):
        pair.delete_documents(["doc-1.txt"], store="live")
    pair.delete_documents(["other-1.txt"], store="live")
    assert documents(pair, "live") == {"other-0.txt", "other-2.txt"}
    with Datastore.open(live) as store:
        assert store.snapshot.verify() == []
        assert store.snapshot.num_documents == 2


def test_lines_are_those_of_the_store_that_is_there_now(pair: LanguageModel, live: Path, model_folder: Path) -> None:
    """Two stores whose entries have the same ids, and whose texts have their line ends elsewhere."""
    texts = live.with_name("texts")
    texts.mkdir()
    for name, text in (("one", "a b c d e f g h " * 8), ("two", "a\nb\nc\nd\ne\nf\ng\nh\n" * 8)):
        (texts / "doc.txt").write_text(text)
        build_index(model_folder, Corpus([texts / "doc.txt"]), live.with_name(name))
    put(live.with_name("one"), live)
    pair.refresh()
    assert {each.line for each in pair.search("live", "a b", k=4000)} == {1}
    put(live.with_name("two"), live)
    pair.refresh()
    assert len({each.line for each in pair.search("live", "a b", k=4000)}) > 30


def test_a_deletion_after_a_roll_back_is_one(pair: LanguageModel, live: Path) -> None:
    backup = Path(shutil.copytree(live, live.with_name("backup")))
    for number in (1, 2):
        pair.delete_documents([f"doc-{number}.txt"], store="live")
    put(backup, live)
    report = pair.delete_documents(["doc-1.txt"], store="live")
    assert report.manifest == read_manifest(backup).number + 1
    assert documents(pair, "live") == {f"doc-{number}.txt" for number in range(8)} - {"doc-1.txt"}


def test_a_store_of_another_model_is_refused_by_name_at_once(
    pair: LanguageModel, live: Path, strange_store: Path, store_folder: Path
) -> None:
    put(strange_store, live)
    assert not pair.refresh()
    for call in (
        lambda: pair.search("live", PROMPT),
        lambda: pair.generate("x", max_tokens=1, store="live"),
        lambda: pair.delete_documents(["doc-1.txt"], store="live"),
    ):
        with pytest.raises(Incompatible, match="another model"):
            call()
    assert "another model" in pair.get_datastore("live").problem
    assert documents(pair, "steady")
    with Datastore.open(live) as store:
        assert store.manifest == read_manifest(strange_store)
    put(store_folder, live)
    pair.refresh()
    assert documents(pair, "live") == documents(pair, "steady")
    assert pair.get_datastore("live").problem == ""


@pytest.mark.parametrize(("harm", "error", "says"), BROKEN)
def test_a_folder_that_cannot_be_used_makes_its_store_unavailable_and_no_other(
    pair: LanguageModel,
    live: Path,
    other_store: Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
    error: type[MemlmError],
    says: str,
) -> None:
    harm(live)
    with caplog.at_level(logging.WARNING, "memlm.stores"):
        for _ in range(4):
            pair.refresh()
    assert len(caplog.messages) == 1
    with pytest.raises(error, match=rf"'live'.*{says}"):
        pair.search("live", PROMPT)
    with pytest.raises(error, match=rf"'live'.*{says}.*name the datastores to use"):
        pair.generate("x", max_tokens=1)
    assert [bool(store.problem) for store in pair.stores] == [True, False]
    assert documents(pair, "steady")
    assert len(list(pair.generate("x", max_tokens=2, temperature=0, use_store=False))) == 2
    put(other_store, live)
    assert pair.refresh()
    assert documents(pair, "live") == {f"other-{number}.txt" for number in range(3)}
    assert "can be used again" in caplog.text


def test_a_folder_that_is_swapped_in_two_steps_is_not_missed(pair: LanguageModel, live: Path) -> None:
    live.rename(live.with_name("away"))
    pair.refresh()
    assert documents(pair, "live") == documents(pair, "steady")
    live.with_name("away").rename(live)
    pair.refresh()
    pair.refresh()
    assert pair.get_datastore("live").problem == ""


@pytest.mark.parametrize(("harm", "error", "says"), BROKEN)
def test_a_store_that_may_fail_does_not_keep_the_others_from_being_opened(
    model_folder: Path,
    live: Path,
    store_folder: Path,
    harm: Callable[[Path], None],
    error: type[MemlmError],
    says: str,
) -> None:
    checkpoint, stores = load_checkpoint(model_folder), {"live": live, "steady": store_folder}
    harm(live)
    with pytest.raises(MemlmError, match=says):
        LanguageModel(checkpoint, stores)
    with LanguageModel(checkpoint, stores, may_fail=["live"]) as lm:
        assert documents(lm, "steady")
        assert lm.get_datastore("live").num_entries == 0
        with pytest.raises(error, match=says):
            lm.search("live", PROMPT)
        with pytest.raises(error, match=says):
            lm.delete_documents(["doc-1.txt"], store="live")
        with pytest.raises(AlreadyExists):
            lm.load_datastore(store_folder, name="live")
        put(store_folder, live)
        lm.refresh()
        assert documents(lm, "live") == documents(lm, "steady")


def test_an_unavailable_store_can_be_replaced_and_unloaded(pair: LanguageModel, live: Path, store_folder: Path) -> None:
    gone(live)
    pair.refresh()
    pair.refresh()
    assert pair.load_datastore(store_folder, name="live", replace=True).problem == ""
    assert documents(pair, "live") == documents(pair, "steady")
    shutil.copytree(store_folder, live)
    pair.load_datastore(live, name="third")
    gone(live)
    pair.refresh()
    pair.refresh()
    assert "no datastore at" in pair.unload_datastore("third").problem
    assert [store.name for store in pair.stores] == ["live", "steady"]


def test_a_generation_that_runs_goes_on_while_its_store_is_unavailable(pair: LanguageModel, live: Path) -> None:
    stream = pair.generate(PROMPT, max_tokens=4, temperature=0, store="live", neighbors=1)
    first = next(stream)
    gone(live)
    pair.refresh()
    pair.refresh()
    assert all(token.neighbors for token in (first, *stream))


def test_the_problem_of_a_store_is_json(pair: LanguageModel, live: Path) -> None:
    without_current(live)
    pair.refresh()
    pair.refresh()
    assert "--repair" in json.dumps(pair.get_datastore("live").problem)
