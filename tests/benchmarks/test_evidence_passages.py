"""Passages in the prompt beside a datastore, in `benchmarks evidence`: chunks, prompts, and their time."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from texts import make_text
from typer.testing import CliRunner

from benchmarks.commands import app
from benchmarks.evidence import equal_time as evidence_equal_time
from benchmarks.evidence import passages as bench
from benchmarks.evidence import questions as evidence_questions
from benchmarks.evidence import tables as evidence
from benchmarks.evidence.passages import passage_tokens, window_of
from memlm.language_model import LanguageModel
from memlm.retrieval.retriever import Retriever


def test_a_window_predicts_its_targets_from_all_before(lm):
    ids = lm.tokenize(make_text(3, 20))[:20]
    window = window_of(lm, ids[:12], ids[12:])
    read = bench.read_windows(lm.checkpoint, [window])
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


@pytest.fixture
def small(monkeypatch):
    """Chunks and prompts of a few tokens, for the short texts of these tests."""
    for name, value in (("CHUNK", 8), ("CONTEXT", 20), ("ROOM", 10), ("QUERY_TOKENS", 6)):
        monkeypatch.setattr(bench, name, value)
        if name != "ROOM":
            monkeypatch.setattr(evidence_equal_time, name, value)
    monkeypatch.setattr(evidence_equal_time, "ROOMS", (0, 8, 16))
    monkeypatch.setattr(evidence_equal_time, "TURNS", 3)
    for name, value in (("BUDGET", 30), ("SPARE_TOKENS", 0), ("FEWEST_WORDS", 2)):
        monkeypatch.setattr(evidence_questions, name, value)


@pytest.fixture
def given(tmp_path):
    """A domain of short texts."""
    for name, count, first in (("stored", 14, 0), ("held-out", 14, 100)):
        (tmp_path / name).mkdir()
        for number in range(count):
            text = f"the memory {chr(ord('a') + number)} is {number}7. {make_text(first + number, 30)} " * 2
            (tmp_path / name / f"{number}.txt").write_text(text, encoding="utf-8")
    return f"tiny={tmp_path / 'stored'},{tmp_path / 'held-out'}"


def rows_of(given, model_folder, *words) -> dict[str, dict[str, dict[str, float]]]:
    """The rows of each table by way and kind."""
    sizes = ["--entries", "600", "--documents", "12", "--document-tokens", "60", "--json"]
    done = CliRunner().invoke(app, ["evidence", given, "--model", str(model_folder), *sizes, *words])
    assert done.exit_code == 0, done.output
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for result in json.loads(done.stdout)["results"]:
        metric, _, label = result["metric"].rstrip("]").partition("[")
        table = label.partition(",")[0].removeprefix("table=")
        tables.setdefault(table, {}).setdefault(label.rpartition("way=")[2], {})[metric] = result["value"]
    return tables


def test_the_command_compares_ways(given, model_folder, small):
    tables = rows_of(given, model_folder, "--only", "passages,questions", "--questions", "9")
    asked = {way.removesuffix(",cut=all"): row for way, row in tables["questions"].items() if way.endswith("=all")}
    assert asked.keys() == {"alone", "datastore", "datastore nearest", "passages by_words", "both"}
    assert asked["alone"]["prompt_tokens"] == asked["datastore"]["prompt_tokens"]
    assert asked["alone"]["prompt_tokens"] == asked["datastore nearest"]["prompt_tokens"]
    assert asked["both"]["prompt_tokens"] <= 30
    assert asked["datastore nearest"]["right"] > asked["datastore"]["right"] > asked["alone"]["right"] == 0
    assert {row["questions"] for row in asked.values()} == {9}
    assert 1 < asked["alone"]["documents"] <= 9
    assert min(row["documents"] for row in tables["questions"].values()) >= 1
    kinds = {cut for way in tables["questions"] if (cut := way.partition(",cut=")[2]) != "all"}
    assert sum(tables["questions"][f"alone,cut={kind}"]["questions"] for kind in kinds) == 9
    more = tables["questions-differences"]["datastore against alone"]["less"]  # wrong answers
    assert more == pytest.approx(asked["datastore"]["right"] - asked["alone"]["right"])
    read = tables["passages"]
    assert read.keys() == {"alone", "datastore", "passages", "both"}
    assert read["alone"]["nats_less"] == 0
    assert read["passages"]["nats_per_token"] != read["alone"]["nats_per_token"]  # it reads half of the text before
    for row in read.values():
        assert row["nats_less"] == pytest.approx(read["alone"]["nats_per_token"] - row["nats_per_token"], abs=1e-9)
    less = tables["passages-differences"]["both against datastore"]["less"]
    assert less == pytest.approx(read["datastore"]["nats_per_token"] - read["both"]["nats_per_token"], abs=1e-9)


def test_the_command_times_passages_beside_a_datastore(given, model_folder, small):
    rows = rows_of(given, model_folder, "--only", "equal-time")["equal-time"]
    assert {"alone", "datastore at_once", "datastore one_by_one", "passages of 0", "passages of 16"} <= rows.keys()
    assert all(row["ms_per_token"] > 0 for row in rows.values())
    assert {row.get("documents") for row in rows.values()} == {6, None}  # None of those that are only timed
    for way in ("at_once", "one_by_one"):
        row = rows[f"passages in the time of {way}"]
        assert 0 <= row["passage_tokens"] <= 16
        assert row["time_over_datastore"] > 0
        assert row["nats_less"] == pytest.approx(rows["alone"]["nats_per_token"] - row["nats_per_token"], abs=1e-9)
    assert rows["datastore at_once"]["nats_less"] == rows["datastore one_by_one"]["nats_less"] != 0
    assert rows["alone"]["nats_less"] == 0


@pytest.mark.parametrize(("search_s", "room"), [(0.0, 0), (1.9, 0), (3.0, 8), (4.0, 12), (9.0, 16)])
def test_the_equal_room_lies_between_the_rooms_that_were_timed(search_s, room):
    """Reading 0, 8 and 16 tokens takes 1, 2 and 4 s, and a search for passages 2 s."""
    read_s = {0: 1.0, 8: 2.0, 16: 4.0}
    find_s = dict.fromkeys(read_s, 2.0)
    turns = [evidence_equal_time.Turn(read_s, find_s, {"at_once": search_s + noise}) for noise in (-0.5, 0, 0.7)]
    assert evidence_equal_time.equal_room(turns, "at_once") == room


def test_cut_passages_have_as_many_tokens_as_asked_for(lm):
    snapshot = lm.engine.stores.model_store().snapshot
    before = snapshot.tokens(next(iter(snapshot.documents())).id, 0, 40).tolist()
    best, second, *_ = lm.find_passages(lm.detokenize(before[-32:]), k=4)
    both = [token for each in (second, best) for token in lm.tokenize(f"{each.text}\n\n")]
    for room in (1, len(both) // 2, len(both)):
        assert evidence_equal_time.passage_end(lm, before, room) == both[-room:]


def test_each_way_reads_equally_many_tokens_at_most(lm):
    ids = lm.tokenize(make_text(3, 900))
    plain, augmented = bench.windows_of(lm, ids)
    assert len(plain) == len(augmented) > 3
    context = bench.CONTEXT  # the start of a text stands for the token that is not read, which is the last target
    assert [len(window.inputs_T) for window in plain] == [context + len(window.targets_N) for window in plain]
    for one, other in zip(plain, augmented, strict=True):
        assert one.targets_N.tolist() == other.targets_N.tolist()
        assert len(one.targets_N) < len(other.inputs_T) <= len(one.inputs_T)
    assert np.concatenate([window.targets_N for window in plain]).tolist() == ids[context:]


@pytest.mark.parametrize("table", ["passages", "equal-time"])
def test_a_document_without_a_whole_context_is_left_out(table, given, model_folder, tokenizer, small, tmp_path):
    for number in range(7):
        short = tokenizer.decode(tokenizer.encode(make_text(number, 30))[:17].tolist())
        (tmp_path / "held-out" / f"{number}.txt").write_text(short, encoding="utf-8")
    rows = rows_of(given, model_folder, "--only", table)[table]
    assert rows["alone"]["documents"] < 6
    assert rows["alone"]["nats_less"] == 0


@pytest.mark.parametrize("table", ["passages", "equal-time"])
@pytest.mark.parametrize(
    ("is_small", "tokens", "message"),
    [
        (False, "60", "the model's context has 48 tokens; expected "),
        (True, "16", "no test document of tiny has "),
    ],
)
def test_what_is_too_short_is_refused_before_the_work(
    table, is_small, tokens, message, given, model_folder, tmp_path, request
):
    if is_small:
        request.getfixturevalue("small")
    words = ["evidence", given, "--model", str(model_folder), "--entries", "600", "--documents", "12"]
    words += ["--work", str(tmp_path / "work"), "--document-tokens", tokens, "--only", f"gain-by-domain,{table}"]
    done = CliRunner().invoke(app, words)
    assert message in str(done.exception)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("rooms", "left_out"),
    [
        ((0, 8, 16), {"cost"}),
        ((0, 8, 32), {"cost", "equal-time"}),
        ((), {"cost", "equal-time", "passages"}),
    ],
    ids=["one", "two", "three"],
)
def test_what_is_too_long_for_a_model_is_left_out_where_no_table_is_asked_for(
    rooms, left_out, given, model_folder, monkeypatch, request
):
    """Of a model with a context of 48 tokens. Without rooms, the prompts have their own sizes, which are longer."""
    if rooms:
        request.getfixturevalue("small")
        monkeypatch.setattr(evidence_equal_time, "ROOMS", rooms)
    names = ("gain-by-domain", "passages", "equal-time", "cost")  # as if there were no others
    monkeypatch.setattr(evidence, "TABLES", {name: evidence.TABLES[name] for name in names})
    monkeypatch.setattr(evidence, "OWN_TABLES", {})
    words = ["evidence", given, "--model", str(model_folder), "--entries", "600", "--documents", "12"]
    done = CliRunner().invoke(app, [*words, "--document-tokens", "60", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    reasons = report["settings"].get("left_out", {}).get("tiny", {})
    assert reasons.keys() == left_out
    assert all("the model's context has 48 tokens; expected " in reason for reason in reasons.values())
    for name in left_out:
        assert f"the table {name} of tiny is left out: {reasons[name]}" in done.stderr
    made = {
        re.findall(r"table=([a-z-]+)", result["metric"])[0].removesuffix("-differences") for result in report["results"]
    }
    assert made == {*names} - left_out


def test_a_search_for_passages_is_timed_by_new_queries_and_the_number_of_the_room(
    given, model_folder, small, monkeypatch
):
    """Of a chunk's eight tokens, the datastore is searched for all at once, and for one after the other."""
    timed, asked, repeated = [False], set[str](), list[str]()
    numbers, searched = list[int](), list[int]()
    find, search, measure = LanguageModel.find_passages, Retriever.search, evidence_equal_time.seconds

    def note_find(lm, question, **options):
        if timed[0]:
            numbers.append(options["k"])
            repeated.extend({question} & asked)
        asked.add(question)
        return find(lm, question, **options)

    def note_search(retriever, keys_ND, *rest):
        if timed[0]:
            searched.append(len(keys_ND))
        return search(retriever, keys_ND, *rest)

    def note_seconds(work):
        timed[0] = True
        taken = measure(work)
        timed[0] = False
        return taken

    monkeypatch.setattr(LanguageModel, "find_passages", note_find)
    monkeypatch.setattr(Retriever, "search", note_search)
    monkeypatch.setattr(evidence_equal_time, "seconds", note_seconds)
    monkeypatch.setattr(evidence_equal_time, "NUM_PASSAGES", 1)
    monkeypatch.setattr(evidence_equal_time, "FEWEST_TOKENS", 4)
    rows_of(given, model_folder, "--only", "equal-time")
    turns = evidence_equal_time.TURNS + 1
    assert numbers[: 3 * turns] == [1, 2, 4] * turns
    assert len(numbers) > 3 * turns  # those of the equal rooms
    assert not repeated
    assert searched == [8, *[1] * 8] * 2 * turns


def test_finished_tables_are_printed_if_a_later_one_fails(given, model_folder, small, tmp_path):
    words = ["evidence", given, "--model", str(model_folder), "--entries", "600", "--documents", "12"]
    words += ["--document-tokens", "60", "--only", "gain-by-domain,questions"]
    for path in (tmp_path / "stored").iterdir():
        path.write_text("the memory of it is of words " * 12, encoding="utf-8")  # which ask no question
    for form in ([], ["--json"]):
        done = CliRunner().invoke(app, [*words, *form])
        assert "no sentence with a name or number" in str(done.exception)
        assert done.exit_code != 0
        assert "gain-by-domain" in done.stdout
    assert {each["metric"].partition("[")[0] for each in json.loads(done.stdout)["results"]} > {"nats_less"}
