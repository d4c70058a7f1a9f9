"""The table `training` of `benchmarks evidence`: a datastore against training on more text."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from texts import make_text
from typer.testing import CliRunner

from benchmarks.commands import app
from benchmarks.evidence import training as evidence_training
from benchmarks.evidence.domains import windows_for
from benchmarks.evidence.texts import Sizes, domain_of
from benchmarks.evidence.training import parts_of
from memlm.api.params import RetrievalParams
from memlm.data.corpus import Corpus, Document
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.generation.scoring import score_windows
from memlm.index.store.datastore import Datastore
from memlm.model.files.checkpoint import load_checkpoint
from memlm.retrieval.encoder import text_windows
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore
from memlm.training.config import PRESETS
from memlm.training.train import train

SIZES = Sizes(entries=6000, documents=12, document_tokens=90)
SETTINGS = replace(
    PRESETS["tiny"], dim=32, num_layers=1, num_heads=2, ff_dim=48, context_length=48, vocab_size=300, batch_size=2
)


def test_a_quarter_is_learned_from_and_the_rest_is_stored():
    documents = [Document(str(number), "x" * size) for number, size in enumerate((10, 20, 30, 40, 20))]
    part, rest = parts_of(documents)
    assert [document.id for document in part] == ["0", "1"]  # 30 of 120 bytes
    assert [document.id for document in rest] == ["2", "3", "4"]
    assert [len(each) for each in parts_of([documents[0], documents[0]])] == [1, 1]
    with pytest.raises(InvalidInput, match="two or more"):
        parts_of(documents[:1])


def test_models_and_datastores_are_of_their_texts(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_training, "SETTINGS", SETTINGS)
    for name, first in (("stored", 0), ("held-out", 100)):
        (tmp_path / name).mkdir()
        for number in range(16):
            text = f"{make_text(first + number, 120)} " * 2
            (tmp_path / name / f"{number}.txt").write_text(text, encoding="utf-8")
    given = f"tiny={tmp_path / 'stored'},{tmp_path / 'held-out'}"
    words = ["evidence", given, "--model", str(model_folder), "--work", str(tmp_path / "work"), "--json"]
    sizes = ["--entries", "6000", "--documents", "12", "--document-tokens", "90", "--minutes", "0.01"]
    done = CliRunner().invoke(app, [*words, *sizes, "--only", "training"])
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "work/tiny").exists()  # a datastore of the given model is of no use here
    rows: dict[str, dict[str, float]] = {}
    for result in json.loads(done.stdout)["results"]:
        metric, _, label = result["metric"].partition("[")
        rows.setdefault(label.rpartition("way=")[2].rstrip("]"), {})[metric] = result["value"]
    ways = ("alone", "one_lam", "adaptive_lam", "context_cache", "both")
    expected = {f"{name} {way}" for name in ("quarter", "equal_time") for way in ways}
    assert rows.keys() == expected | {"equal_tokens alone"}
    first = rows["quarter alone"]
    assert first["nats_less"] == 0
    for row in rows.values():
        assert row["nats_less"] == pytest.approx(first["nats_per_token"] - row["nats_per_token"])
    assert rows["quarter one_lam"]["nats_less"] > 0
    assert rows["equal_tokens alone"]["steps"] == first["steps"] < rows["equal_time alone"]["steps"]
    assert rows["quarter both"]["processor_s"] > first["processor_s"] == rows["quarter context_cache"]["processor_s"]

    folder = tmp_path / "work/tiny.training"
    domain = domain_of(given, load_checkpoint(model_folder).tokenizer, SIZES, seed=0)
    part, rest = parts_of(domain.stored)
    tokenizer = Tokenizer.load(folder / "quarter")
    for name, documents in (("quarter", part), ("equal_tokens", domain.stored), ("equal_time", domain.stored)):
        config = replace(SETTINGS, steps=int(rows[f"{name} alone"]["steps"]))
        train(Corpus(documents), tmp_path / name, config, tokenizer=tokenizer)
        again, before = (load_file(each / name / "model.safetensors") for each in (tmp_path, folder))
        assert all(np.array_equal(again[key], before[key]) for key in before)
        checkpoint = load_checkpoint(folder / name)
        assert _nats(checkpoint, domain.test, None) == pytest.approx(rows[f"{name} alone"]["nats_per_token"], abs=1e-4)
    for name in ("quarter", "equal_time"):
        checkpoint = load_checkpoint(folder / name)
        with Datastore.open(folder / f"{name}-datastore/store") as datastore:
            assert {each.id for each in datastore.snapshot.documents()} == {document.id for document in rest}
            retriever = Retriever.of([ModelStore(datastore, checkpoint)], RetrievalParams())
            nats = _nats(checkpoint, domain.test, retriever)
        assert nats == pytest.approx(rows[f"{name} adaptive_lam"]["nats_per_token"], abs=1e-3)


def _nats(checkpoint, documents, retriever) -> float:
    """Nats per token of documents, scored one window after another."""
    nats, tokens = 0.0, 0
    for document in documents:
        windows = text_windows(checkpoint, document.text, windows_for(checkpoint))
        for scored in score_windows(checkpoint, windows, retriever, None, at_once=1):
            logprobs_N = scored.lm_logprobs_N if retriever is None else scored.logprobs_N
            nats, tokens = nats - float(logprobs_N.sum()), tokens + len(logprobs_N)
    return nats / tokens
