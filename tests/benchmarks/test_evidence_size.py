"""The table `by-size` of `benchmarks evidence`: datastores of several sizes, their gains and the time of a token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from texts import make_text

from benchmarks.evidence import size as evidence_size
from benchmarks.evidence.domains import prepare
from benchmarks.evidence.gain import gain_by_domain
from benchmarks.evidence.size import by_size, ratios_of, smaller_stores
from benchmarks.evidence.texts import Sizes, domain_of, parts_to_store
from memlm.bench import texts
from memlm.index.store.datastore import Datastore

SIZES = Sizes(entries=600, documents=12, document_tokens=60)


@pytest.fixture
def given(tmp_path) -> str:
    for name, first in (("stored", 0), ("held-out", 100)):
        (tmp_path / name).mkdir()
        for number in range(14):
            text = f"{make_text(first + number, 30)} " * 3
            (tmp_path / name / f"{number}.txt").write_text(text, encoding="utf-8")
    return f"tiny={tmp_path / 'stored'},{tmp_path / 'held-out'}"


def test_smaller_parts_are_beginnings_of_larger_ones(given, tokenizer):
    larger = domain_of(given, tokenizer, SIZES, seed=0).stored
    small = parts_to_store(larger, tokenizer, Sizes(entries=150, document_tokens=20))
    assert [document.id for document in small] == [document.id for document in larger[: len(small)]]
    assert all(whole.text.startswith(document.text) for document, whole in zip(small, larger, strict=False))
    assert max(len(tokenizer.encode(document.text)) for document in small) <= 21
    assert 145 <= sum(len(tokenizer.encode(document.text)) for document in small) <= 155


def test_the_largest_size_gains_as_the_domain_does(given, checkpoint, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_size, "MARKS", (150, 300, 5000))
    monkeypatch.setattr(evidence_size, "REPEATS", 3)
    monkeypatch.setattr(texts, "TOKENS", 10)
    monkeypatch.setattr(texts, "PROMPT", "a")
    domain = domain_of(given, tokenizer, SIZES, seed=0)
    prepared = prepare(checkpoint, domain, tmp_path / "work", SIZES)
    rows = by_size(checkpoint, prepared, lambda *_: None)
    by_entries = {(row["entries"], row["way"]): row for row in rows}
    sizes = sorted({entries for entries, _ in by_entries})
    assert len(sizes) == 3  # no datastore has 5,000
    assert [round(size / each, 1) for size, each in zip(sizes, (150, 300, 600), strict=True)] == [1, 1, 1]
    for row in gain_by_domain(checkpoint, prepared, lambda *_: None):
        if row["way"] in ("one_lam", "adaptive_lam"):
            same = by_entries[sizes[-1], row["way"]]
            for name in ("nats_per_token", "nats_less", "nats_less_error"):
                assert same[name] == pytest.approx(row[name], abs=1e-9)
    gains = [by_entries[size, "one_lam"]["nats_less"] for size in sizes]
    assert gains[0] < gains[-1]
    for row in rows:
        assert 0 < row["over_alone_least"] <= row["over_alone"] <= row["over_alone_most"]
        assert row["token_ms"] > 0
        assert row["over_alone_n"] == 3
        assert row["bytes_per_entry"] > 2 * checkpoint.decoder.config.dim
    for store in (tmp_path / "work").glob("store*"):
        with Datastore.open(store) as datastore:
            assert "tokens" in (datastore.snapshot.defaults.tuned_on or "")


def test_a_size_beyond_the_text_makes_no_second_datastore(given, checkpoint, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_size, "MARKS", (150, 10_000))
    sizes = replace(SIZES, entries=20_000)
    prepared = prepare(checkpoint, domain_of(given, tokenizer, sizes, seed=0), tmp_path / "work", sizes)
    with Datastore.open(prepared.store) as datastore:
        assert 150 < datastore.snapshot.num_entries < 10_000
    assert smaller_stores(checkpoint, prepared, lambda *_: None) == [tmp_path / "work" / "store-150"]


def test_insides_of_documents_are_the_same_text_in_all_sizes(given, checkpoint, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_size, "MARKS", (150,))
    sizes = replace(SIZES, document_start=10)
    prepared = prepare(checkpoint, domain_of(given, tokenizer, sizes, seed=0), tmp_path / "work", sizes)
    (smaller,) = smaller_stores(checkpoint, prepared, lambda *_: None)
    with Datastore.open(prepared.store) as large, Datastore.open(smaller) as small:
        (span,) = small.snapshot.sample_documents(1, 0)
        name = small.snapshot.locate(np.array([span.first_id]))[0].document_id
        tokens = small.snapshot.tokens(name).tolist()
        # The last token of a part may be another one, where the text of the part is tokenized by itself.
        assert tokens[:-1] == large.snapshot.tokens(name).tolist()[: len(tokens) - 1]


def test_a_ratio_is_of_one_turn():
    first, second = ratios_of([[1, 2, 5], [2, 3, 4], [1, 4, 2]])
    assert first == {
        "token_ms": 3, "token_ms_alone": 1, "over_alone": 2, "over_alone_least": 1.5, "over_alone_most": 4,
        "over_alone_n": 3,
    }  # fmt: skip
    assert (second["token_ms"], second["over_alone"]) == (4, 2)
