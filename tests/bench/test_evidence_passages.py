"""Passages in the prompt beside a datastore, in `memlm bench evidence`: chunks, questions by rule, and prompts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from texts import make_text
from typer.testing import CliRunner

from memlm.bench import evidence_passages as bench
from memlm.bench.evidence_generation import begins_with
from memlm.bench.evidence_passages import Question, by_document, passage_tokens, prompt_of, questions_of, window_of
from memlm.cli.app import app
from memlm.data.corpus import Document
from memlm.errors import InvalidInput

TEXT = (
    "It is said in the old book of the town that Maren was there. The number of the door in the hall is 4711, and the"
    " door is red. The number of the door in the hall is 4711 again. We saw in the end of it all nothing.\nHere the"
    " port of the small new server is called Porto. Short is 5."
)


def test_questions_ask_for_names_and_numbers_behind_six_words():
    found = questions_of([Document("d", TEXT), Document("e", "nothing to ask.")], 10)
    assert sorted((question.text, question.answer) for question in found) == [
        ("Here the port of the small new server is called", "Porto"),
        ("It is said in the old book of the town that", "Maren"),
        ("The number of the door in the hall is", "4711"),
    ]
    assert {question.document_id for question in found} == {"d"}
    assert questions_of([Document("d", TEXT)], 2) == questions_of([Document("d", TEXT)], 3)[:2]
    with pytest.raises(InvalidInput, match="name or number"):
        questions_of([Document("e", "nothing to ask.")], 10)


def test_an_answer_is_right_as_a_whole_word():
    answers = [" 4711, and", "4711", " 47111", "the 4711", ""]
    assert [begins_with(each, "4711") for each in answers] == [True, True, False, False, False]


def test_figures_are_summed_by_document():
    asked = [Question(name, "", "") for name in ("a", "b", "a")]
    sums, counts = by_document(asked, [True, False, True])
    assert (sums.tolist(), counts.tolist()) == ([2, 0], [2, 1])


def test_a_window_predicts_its_targets_from_all_before(lm):
    ids = lm.tokenize(make_text(3, 20))[:20]
    window = window_of(lm, ids[:12], ids[12:])
    read = bench._read(lm.checkpoint, [window])
    with torch.inference_mode():
        hidden_1TD, _ = lm.checkpoint.decoder(torch.tensor([[lm.checkpoint.tokenizer.start_id, *ids[:-1]]]))
        logprobs_TV = lm.checkpoint.decoder.logprobs(hidden_1TD[0])
    expected = [float(logprobs_TV[place, ids[place]]) for place in range(12, 20)]
    np.testing.assert_allclose(read.lm_logprobs_N, expected, atol=1e-4)


def test_the_best_passage_stands_last_and_all_fit(lm, monkeypatch):
    snapshot = lm.engine.stores.model_store().snapshot
    query = lm.detokenize(snapshot.tokens(next(iter(snapshot.documents())).id, 10, 30).tolist())
    best, second, *_ = lm.find_passages(query, k=2)
    monkeypatch.setattr(bench, "NUM_PASSAGES", 2)
    monkeypatch.setattr(bench, "ROOM", 1000)
    expected = [token for each in (second, best) for token in lm.tokenize(f"{each.text}\n\n")]
    assert passage_tokens(lm, query) == expected
    monkeypatch.setattr(bench, "ROOM", len(expected) - 1)
    assert passage_tokens(lm, query) == lm.tokenize(f"{best.text}\n\n")
    monkeypatch.setattr(bench, "ROOM", 0)
    assert passage_tokens(lm, query) == []
    assert prompt_of(lm, query, "") == query
    prompt = prompt_of(lm, query, "words")
    assert prompt.endswith(f"{best.text}\n\n{query}")


def test_the_command_compares_ways(model_folder, tmp_path, monkeypatch):
    for name, value in (("CHUNK", 8), ("CONTEXT", 20), ("ROOM", 10), ("QUERY_TOKENS", 6), ("BUDGET", 30)):
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "ANSWER_TOKENS", 4)
    monkeypatch.setattr(bench, "FEWEST_WORDS", 2)
    for name, count, first in (("stored", 14, 0), ("held-out", 14, 100)):
        (tmp_path / name).mkdir()
        for number in range(count):
            text = f"the memory is {number}7. {make_text(first + number, 30)} " * 2
            (tmp_path / name / f"{number}.txt").write_text(text, encoding="utf-8")
    words = ["bench", "evidence", f"tiny={tmp_path / 'stored'},{tmp_path / 'held-out'}", "--model", str(model_folder)]
    sizes = [
        "--entries",
        "600",
        "--documents",
        "12",
        "--document-tokens",
        "60",
        "--only",
        "passages,questions",
        "--json",
    ]
    done = CliRunner().invoke(app, [*words, *sizes])
    assert done.exit_code == 0, done.output
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for result in json.loads(done.stdout)["results"]:
        metric, _, label = result["metric"].partition("[")
        table, way = label.partition(",")[0], label.rpartition("way=")[2].rstrip("]")
        rows.setdefault((table, way), {})[metric] = result["value"]
    asked = {way: row for (table, way), row in rows.items() if table == "table=questions"}
    assert asked.keys() == {"alone", "datastore", "passages by_words", "passages by_meaning", "both"}
    assert asked["alone"]["prompt_tokens"] == asked["datastore"]["prompt_tokens"]
    assert asked["both"]["prompt_tokens"] <= 30
    assert asked["datastore"]["right"] > asked["alone"]["right"] == 0
    read = {way: row for (table, way), row in rows.items() if table == "table=passages"}
    assert read.keys() == {"alone", "datastore", "passages", "both"}
    assert read["alone"]["nats_less"] == 0
    assert read["passages"]["nats_per_token"] != read["alone"]["nats_per_token"]  # it reads half of the text before
    for row in read.values():
        assert row["nats_less"] == pytest.approx(read["alone"]["nats_per_token"] - row["nats_per_token"], abs=1e-9)
