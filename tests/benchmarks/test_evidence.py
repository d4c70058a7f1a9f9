"""Tables of `benchmarks evidence`: texts, ways of mixing, and cuts, each held against its obvious form."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from texts import make_text
from typer.testing import CliRunner

from benchmarks.commands import app
from benchmarks.evidence import deletion as evidence_deletion
from benchmarks.evidence import generation as evidence_generation
from benchmarks.evidence.deletion import KINDS, REMEMBERED, factory_of
from benchmarks.evidence.domains import (
    ADAPTIVE,
    ALONE,
    BOTH,
    CACHE,
    ONE_LAM,
    ReadText,
    differences,
    logprobs_of,
    nats_less,
    nats_of,
    read_document,
    searched,
    windows_for,
    work_clock,
)
from benchmarks.evidence.generation import begins_with, facts_of, is_attributed, longest_copied
from benchmarks.evidence.texts import Sizes, domain_of, ngrams, overlap, text_hash
from benchmarks.evidence.tokens import frequency, grams_of, overlaps, shares_of, word_classes
from memlm.api.params import RetrievalParams
from memlm.data.corpus import Document
from memlm.errors import InvalidInput
from memlm.generation.scoring import score_windows
from memlm.index.factory import Factory
from memlm.index.store.datastore import Datastore
from memlm.indexing.option_trials import EncodedText
from memlm.retrieval.adaptive import AdaptiveLam
from memlm.retrieval.context_cache import ContextCache
from memlm.retrieval.encoder import text_windows
from memlm.retrieval.own_past import ContextSettings, OwnPast
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore

SIZES = Sizes(entries=600, documents=12, document_tokens=60)
LAM = AdaptiveLam(0.3, (-0.5, 0.2, 1.5, 0.1, -0.7), (1.0, 0.5, 0.5, 1.0, -1.0), (0.5, 0.5, 0.3, 0.5, 0.8))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A domain of texts for a datastore, and held-out ones."""
    folder = tmp_path_factory.mktemp("domain")
    for name, count, first in (("stored", 14, 0), ("held-out", 14, 100)):
        (folder / name).mkdir()
        for number in range(count):
            text = f"{make_text(first + number, 30)} " * 3
            (folder / name / f"{number}.txt").write_text(text, encoding="utf-8")
    return f"tiny={folder / 'stored'},{folder / 'held-out'}"


def test_each_way_is_that_of_scoring(checkpoint, store_folder):
    document, size = Document("d", f"{make_text(7, 60)} " * 2), windows_for(checkpoint)
    settings = ContextSettings(k=5, temperature=0.5, lam=0.4)
    with Datastore.open(store_folder) as datastore:
        tuned = Retriever.of([ModelStore(datastore, checkpoint)], RetrievalParams())
        retriever = replace(tuned, knn=replace(tuned.knn, adaptive=LAM, lam=0.3))
        read = read_document(checkpoint, document, size)
        found = searched(read, retriever, settings)
        slow = {
            ONE_LAM: (replace(retriever, knn=replace(retriever.knn, adaptive=None)), False),
            ADAPTIVE: (retriever, False),
            CACHE: (None, True),
            BOTH: (retriever, True),
        }
        for way, (searching, with_cache) in slow.items():
            past = OwnPast(settings, ContextCache(checkpoint.decoder.config.dim)) if with_cache else None
            windows = text_windows(checkpoint, document.text, size)
            parts = [part.logprobs_N for part in score_windows(checkpoint, windows, searching, past, at_once=1)]
            np.testing.assert_allclose(logprobs_of(read, found[way]), np.concatenate(parts), atol=1e-3, err_msg=way)
        assert found.keys() == slow.keys()


def text_of(alone: list[float], mixed: list[float]) -> ReadText:
    logprobs = {ALONE: np.array(alone, np.float32), BOTH: np.array(mixed, np.float32)}
    zeros = np.zeros(len(alone), np.float32)
    return ReadText(Document("d", "d"), EncodedText(zeros[:, None], zeros, zeros, zeros.astype(np.int64)), logprobs)


def test_nats_are_of_the_chosen_tokens_with_an_error_over_documents():
    texts = [text_of([-1, -2, -3], [-1, -1, -1]), text_of([-4, -4], [-5, -3])]
    figures = nats_less(texts, BOTH)
    assert figures["nats_per_token"] == pytest.approx(14 / 5)
    assert figures["nats_less"] == pytest.approx(3 / 5)
    # Of the ratio of two sums over documents: residuals 3 - 3 * 3/5 and 0 - 2 * 3/5.
    assert figures["nats_less_error"] == pytest.approx(math.sqrt((1.2**2 + 1.2**2) * 2) / 5)
    chosen = [np.array([False, True, False]), np.array([True, True])]
    figures = nats_less(texts, BOTH, chosen)
    assert figures["nats_per_token"] == pytest.approx(10 / 3)
    assert figures["nats_less"] == pytest.approx(1 / 3)


def test_shares_count_the_tokens_that_gain_and_lose_with_an_error_over_documents():
    alone = [[-1.0, -2, -3, -4], [-1, -2], [-5]]
    mixed = [[-0.5, -2.5, -3, -4 - 5e-7], [-1.1, -2.2], [-4]]
    masks = [np.array([True] * 4), np.array([True, True]), np.array([False])]
    found = shares_of([text_of(*each) for each in zip(alone, mixed, strict=True)], BOTH, masks)
    assert found["share_losing"] == pytest.approx(3 / 6)  # 1 of 4 and 2 of 2
    assert found["share_losing_error"] == pytest.approx(math.sqrt(((1 - 4 / 2) ** 2 + (2 - 2 / 2) ** 2) * 3 / 2) / 6)
    assert found["share_gaining"] == pytest.approx(1 / 6)  # 1 of 4 and 0 of 2
    assert found["share_gaining_error"] == pytest.approx(math.sqrt(((1 - 4 / 6) ** 2 + (2 / 6) ** 2) * 3 / 2) / 6)


def test_a_difference_has_the_error_of_paired_documents():
    texts = [text_of([-1, -2, -3], [-1, -1, -1]), text_of([-4, -4], [-5, -3])]
    sums, sizes = {way: nats_of(texts, way) for way in (ALONE, BOTH)}, np.array([3, 2])
    (row,) = differences("gain", "tiny", sums, sizes, [(BOTH, ALONE)])
    less = nats_less(texts, BOTH)
    assert (row["less"], row["less_error"]) == (less["nats_less"], less["nats_less_error"])
    assert (row["table"], row["way"], row["documents"]) == ("gain-differences", "both against alone", 2)
    steady = {ALONE: np.array([5.0, 9.0]), BOTH: np.array([2.0, 6.0])}  # each document gains 3, so there is no error
    (row,) = differences("gain", "tiny", steady, np.array([2, 2]), [(BOTH, ALONE)])
    assert (row["less"], row["less_error"]) == (1.5, 0)


def test_only_a_gpu_is_timed_by_the_time_that_passes():
    clocks = [work_clock(torch.device(name)) for name in ("cpu", "cuda:0")]
    before = [clock() for clock in clocks]
    time.sleep(0.2)
    of_the_processor, of_the_wall = (clock() - begin for clock, begin in zip(clocks, before, strict=True))
    assert of_the_processor < 0.1 < 0.2 <= of_the_wall


def test_overlap_counts_the_ngrams_of_each_text():
    assert ngrams("A b c D", 3) == ["a b c", "b c d"]
    assert overlap(["a b c d", "x y z a b c", "a"], ["q A B c", "z a"], 3) == [0.5, 0.25, 0.0]


def test_a_domain_is_drawn_without_repeats(given, tokenizer):
    domain = domain_of(given, tokenizer, SIZES, seed=0)
    names = [document.id for document in domain.held_out]
    assert len({*names}) == len(names) == 12
    assert {each.id for each in domain.tuning}.isdisjoint(each.id for each in domain.test)
    tokens = [len(tokenizer.encode(each.text)) for each in domain.held_out]
    assert min(tokens) >= 15
    assert max(tokens) <= 61
    assert 595 <= sum(len(tokenizer.encode(each.text)) for each in domain.stored) <= 606
    again, other = (domain_of(given, tokenizer, SIZES, seed) for seed in (0, 1))
    assert text_hash(again.stored) == text_hash(domain.stored)
    assert text_hash(other.stored) != text_hash(domain.stored)


def test_parts_of_documents_leave_out_their_beginnings(given, tokenizer):
    whole = domain_of(given, tokenizer, replace(SIZES, entries=9999, document_tokens=400), seed=0)
    inner = domain_of(given, tokenizer, replace(SIZES, document_tokens=20, document_start=15), seed=0)
    for part in ("stored", "held_out"):
        ids = {each.id: tokenizer.encode(each.text).tolist() for each in getattr(whole, part)}
        documents = getattr(inner, part)
        assert len(documents) >= 10
        for document in documents:
            text = tokenizer.decode(ids[document.id][15:]).lstrip("\ufffd")  # the 15 may end within a letter
            assert text.startswith(document.text)
            assert len(tokenizer.encode(document.text)) <= (21 if part == "held_out" else 51)


def test_documents_that_end_before_the_part_are_left_out(given, tokenizer):
    with pytest.raises(InvalidInput, match=r"0 held-out documents of 4015 tokens or more; .* or leave out fewer"):
        domain_of(given, tokenizer, replace(SIZES, document_start=4000), seed=0)


def test_a_hash_tells_where_texts_end():
    assert text_hash([Document("a", "xy"), Document("b", "z")]) == text_hash([Document("c", "xy"), Document("d", "z")])
    assert text_hash([Document("a", "xy"), Document("b", "z")]) != text_hash([Document("a", "x"), Document("b", "yz")])


def test_no_package_of_the_library_is_in_both_parts(tokenizer):
    domain = domain_of("library", tokenizer, replace(SIZES, entries=20_000, documents=60), seed=0)
    packages = [
        {each.id.split("/")[0].removesuffix(".py") for each in part} for part in (domain.stored, domain.held_out)
    ]
    assert packages[0]
    assert packages[1]
    assert packages[0].isdisjoint(packages[1])


def test_a_file_of_wikitext_has_articles(tmp_path, tokenizer):
    articles = [
        f" = Page {number} = \n\n {make_text(number, 40)} \n\n = = Part = = \n\n the end \n\n" for number in range(9)
    ]
    for name in ("stored", "held-out"):
        (tmp_path / f"{name}.txt").write_text("".join(articles), encoding="utf-8")
    domain = domain_of(f"wiki={tmp_path / 'stored.txt'},{tmp_path / 'held-out.txt'}", tokenizer, SIZES, seed=0)
    assert len(domain.held_out) == 9
    assert all(document.text.lstrip().startswith("= Page") for document in domain.held_out)
    assert len({document.text for document in domain.held_out}) == 9


@pytest.mark.parametrize("wrong", ["books", "=a,b", "Books=a,b", "books=a", "library=a"])
def test_a_domain_in_another_form_is_refused(wrong, tokenizer):
    with pytest.raises(InvalidInput, match=r"NAME=STORED,HELD_OUT"):
        domain_of(wrong, tokenizer, SIZES, seed=0)


def test_few_documents_are_refused(given, tokenizer):
    with pytest.raises(InvalidInput, match="eight or more"):
        domain_of(given, tokenizer, replace(SIZES, documents=7), seed=0)


def test_tokens_are_cut_by_frequency_overlap_and_word(tokenizer):
    assert [frequency(count) for count in (0, 1, 9, 10, 99, 100, 5000)] == [
        "0",
        "1-9",
        "1-9",
        "10-99",
        "10-99",
        "100+",
        "100+",
    ]
    stored = np.arange(10, 20)
    known = [{*grams_of(stored, length)} for length in (2, 4, 8)]
    ids = np.array([5, 10, 11, 12, 13, 14, 3, 19])
    assert overlaps(ids, known) == ["none", "none", "2 tokens", "2 tokens", "4 tokens", "4 tokens", "none", "none"]
    text = "The Nile, of 6650 km of water"
    ids = tokenizer.encode(text).tolist()
    classes = word_classes(ids, tokenizer)
    ends = np.cumsum([len(tokenizer.decode([each])) for each in ids])
    assert ends[-1] == len(text)
    by_place = {int(end): label for end, label in zip(ends, classes, strict=True)}
    expected = {len("The"): "function word", len("The Nile"): "name", len("The Nile,"): "sign", len(text): "other word"}
    assert {end: by_place[end] for end in expected} == expected
    assert by_place[len("The Nile, of 6650")] == "number"


def test_the_command_keeps_what_it_prepared(given, model_folder, tmp_path):
    words = ["evidence", given, "--model", str(model_folder), "--work", str(tmp_path), "--json"]
    sizes = ["--entries", "600", "--documents", "12", "--document-tokens", "60"]
    first = CliRunner().invoke(app, [*words, *sizes, "--only", "gain-by-domain"])
    assert first.exit_code == 0, first.output
    report = json.loads(first.stdout)
    found = {result["metric"]: result for result in report["results"]}
    texts = report["settings"]["texts"]["tiny"]
    assert {name: part["documents"] for name, part in texts.items()} == {"stored": 10, "tuning": 6, "test": 6}
    way = next(metric for metric in found if metric.startswith("nats_less[") and "way=both" in metric)
    assert found[way]["value"] > 0  # texts of 30 words, three times
    assert found[way]["low"] < found[way]["value"] < found[way]["high"]
    store = tmp_path / "tiny" / "store" / "CURRENT"
    before = store.stat().st_mtime_ns
    second = CliRunner().invoke(app, [*words, *sizes, "--only", "gain-by-domain,gain-by-token"])
    assert second.exit_code == 0, second.output
    again = {result["metric"]: result for result in json.loads(second.stdout)["results"]}
    assert store.stat().st_mtime_ns == before
    assert again[way] == found[way]
    shares = [each["value"] for metric, each in again.items() if "share_of_tokens[" in metric and "way=both" in metric]
    assert sum(shares) == pytest.approx(4)  # all tokens, and three cuts of all tokens
    gains = {
        tuple(re.findall(r"^(\w+)\[.*way=(\w+),cut=(.*)\]$", metric)[0]): each["value"]
        for metric, each in again.items()
        if metric.partition("[")[2].startswith("table=gain-by-token,")
    }
    for each_way in (ONE_LAM, ADAPTIVE, CACHE, BOTH):
        assert gains["nats_less", each_way, "all tokens"] == pytest.approx(
            next(found[metric]["value"] for metric in found if re.match(rf"nats_less\[.*way={each_way},", metric))
        )
        for end in ("losing", "gaining"):  # the whole is the mean of the parts
            parts = [
                gains["share_of_tokens", each_way, cut] * gains[f"share_{end}", each_way, cut]
                for name, way_of_row, cut in gains
                if (name, way_of_row) == ("share_of_tokens", each_way) and cut.startswith("word ")
            ]
            assert gains[f"share_{end}", each_way, "all tokens"] == pytest.approx(sum(parts))
        assert gains["share_losing", each_way, "all tokens"] + gains["share_gaining", each_way, "all tokens"] <= 1
    assert gains["share_losing", BOTH, "all tokens"] > 0
    values = {(metric.partition("[")[0], re.findall("way=([^,]*?)[],]", metric)[0]): found[metric] for metric in found}
    more = values["nats_less", BOTH]["value"] - values["nats_less", ADAPTIVE]["value"]
    assert values["less", f"{BOTH} against {ADAPTIVE}"]["value"] == pytest.approx(more, abs=1e-9)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert report["settings"]["device"] == "cpu"
    number_type = "bfloat16" if report["settings"]["dtype"] == "float32" else "float32"
    for other, why in ((["--seed", "1"], "other texts"), (["--dtype", number_type], "another number type")):
        refused = CliRunner().invoke(app, [*words, *sizes, *other, "--only", "gain-by-domain"])
        assert f"work has the datastore of tiny of {why}" in str(refused.exception)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == kept


def test_every_kind_of_index_forgets(given, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_deletion, "KINDS", ("Flat", "IVF,SQ8"))
    monkeypatch.setattr(evidence_deletion, "LISTS", 2)
    monkeypatch.setattr(evidence_deletion, "KEPT_TOKENS", 300)
    words = ["evidence", given, "--model", str(model_folder), "--work", str(tmp_path), "--json"]
    sizes = ["--entries", "600", "--documents", "12", "--document-tokens", "60"]
    done = CliRunner().invoke(app, [*words, *sizes, "--only", "deletion"])
    assert done.exit_code == 0, done.output
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for result in json.loads(done.stdout)["results"]:
        metric, _, words = result["metric"].rstrip("]").partition("[")
        index, _, kind = words.rpartition("index=")[2].partition(",cut=")
        rows.setdefault((index, kind), {})[metric] = result["value"]
    assert {index for index, _ in rows} == {"Flat", "IVF SQ8", "remembered"}
    for (_, kind), row in rows.items():
        assert row["traces_held"] == row["traces_deleted"] == row["traces"]
        assert row["traces_purged"] == row["traces_never"] == 0
        if not kind:
            assert row["traces"] > 0
            assert row["nats_held"] < row["nats_never"]  # the documents' own entries find them
            assert row["off_held"] > 0.01
            assert row["off_purged"] < 1e-6
    assert rows["Flat", ""]["off_deleted"] < 1e-6
    for index in ("Flat", "IVF SQ8", "remembered"):
        kinds = {kind: row["traces"] for (each, kind), row in rows.items() if each == index and kind}
        assert sum(kinds.values()) == rows[index, ""]["traces"]
        missing = {kind for kind, count in kinds.items() if not count}
        assert missing <= {"word", "term", "code"}  # all texts have the same words
        assert kinds["id"] == kinds["title"] == kinds["metadata"] == 12
        assert (kinds["code"] > 0) == (index == "IVF SQ8")


@pytest.mark.parametrize("kind", [*KINDS, REMEMBERED])
def test_every_kind_is_an_index_of_faiss(kind):
    text = factory_of(kind, 64)
    assert text == "Flat" or Factory.parse(text).lists == evidence_deletion.LISTS


def test_facts_have_names_of_their_own():
    facts = facts_of(100)
    assert len({fact.id for fact in facts}) == len({fact.question for fact in facts}) == 100
    assert len({fact.answer for fact in facts}) == 100
    assert all(fact.answer not in other.question for fact in facts for other in facts)
    first = facts[0]
    answers = (f" {first.answer}", f"{first.answer}. And", f" {first.answer}s", f"the {first.answer}", "")
    assert [begins_with(answer, first.answer) for answer in answers] == [True, True, False, False, False]


def test_the_longest_copied_run_is_whole_tokens_of_one_document():
    stored = [np.array([1, 2, 3, 256]), np.array([4, 5, 1])]
    assert longest_copied([9, 2, 3, 256, 4, 5], stored) == 3
    assert longest_copied([3, 256, 4, 5, 1], stored) == 3
    assert longest_copied([9, 9], stored) == 0
    assert longest_copied([1 << 16], [np.array([1, 1])]) == 0  # its bytes stand across two tokens


def test_a_source_contains_a_token_and_its_predecessors(lm):
    snapshot = lm.engine.stores.model_store().snapshot
    document = next(iter(snapshot.documents()))
    ids = snapshot.tokens(document.id).tolist()
    (copied,) = lm.generate_batch(
        [ids[:20]], temperature=0, max_tokens=3, neighbors=4, lam=1.0, k=1, knn_temperature=0.1
    )
    expected = []
    for number, token in enumerate(copied.tokens):
        before = [*ids[:20], *(each.id for each in copied.tokens[: number + 1])][-4:]
        source = token.neighbors[0]
        place = source.token_offset
        assert snapshot.tokens(source.document_id)[place] == source.token_id
        stored = snapshot.tokens(source.document_id)[max(0, place - 3) : place + 1].tolist()
        expected.append(stored == before)
        assert is_attributed(number, copied.tokens, ids[:20], snapshot) == expected[-1]
    assert expected[0]
    assert not is_attributed(0, copied.tokens, [0] * 20, snapshot)


def test_text_is_generated_and_facts_are_taught(given, model_folder, tmp_path, monkeypatch):
    for name, value in (("PROMPT_TOKENS", 12), ("TOKENS", 10), ("FACTS", 6)):
        monkeypatch.setattr(evidence_generation, name, value)
    monkeypatch.setattr(evidence_generation, "FORMS", {"as_taught": ""})  # the model's context is short
    monkeypatch.setattr(evidence_generation, "RELATIONS", ("{} is",))
    monkeypatch.setattr(evidence_generation, "ANSWER_TOKENS", 24)
    words = ["evidence", given, "--model", str(model_folder), "--work", str(tmp_path), "--json"]
    sizes = ["--entries", "600", "--documents", "12", "--document-tokens", "60"]
    done = CliRunner().invoke(app, [*words, *sizes, "--only", "generation,facts"])
    assert done.exit_code == 0, done.output
    found = {each["metric"]: each["value"] for each in json.loads(done.stdout)["results"]}
    rows = {name: {} for name in ("alone", "memory", "as_taught tuned", "as_taught nearest")}
    for metric, value in found.items():
        rows[metric.rpartition("way=")[2].rstrip("]")][metric.partition("[")[0]] = value
    assert rows["alone"]["from_memory"] == 0
    assert "attribution_precision" not in rows["alone"]
    assert rows["memory"]["from_memory"] > 0
    assert rows["memory"]["copied_tokens"] > rows["alone"]["copied_tokens"]
    tuned, nearest = rows["as_taught tuned"], rows["as_taught nearest"]
    for row in (tuned, nearest):
        assert row["right_before"] == row["right_deleted"] == 0
    assert 0 < tuned["right_taught"] < nearest["right_taught"]  # the random model has a soft temperature
    assert nearest["right_taught"] == 1
