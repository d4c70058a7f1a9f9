"""`python -m benchmarks asking` counts right answers, sentences and sources, and goes on where it was stopped."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from chats import save_chat_model
from typer.testing import CliRunner

from benchmarks.asking import bench
from benchmarks.asking.bench import bench_asking, table
from benchmarks.asking.ways import WAYS, contains, f1, logprob, normalized, right_passage, source_of
from benchmarks.commands import app
from benchmarks.questions import questions_of
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.indexing.build import build_index
from memlm.language_model import load

FOLDER = Path(bench.__file__).parent
TEXTS = {
    "kettle.txt": "The kettle is red. The kettle of the office boils at 100 degrees.",
    "gateway.txt": "The gateway listens on port 7443. It forwards requests.",
    "printer.txt": "The printer stands in the cellar. It has no paper.",
}
ASKED = [
    {"id": 1, "question": "At how many degrees boils the kettle?", "answers": ["100"], "document_id": "kettle.txt"},
    {"id": 2, "question": "On which port listens the gateway?", "answers": ["1234"], "files": ["gateway.html"]},
    {"id": 3, "question": "Does the gateway boil degrees on the kettle?", "answers": ["red"], "files": ["printer.md"]},
]


@pytest.fixture
def paths(tmp_path, tokenizer):
    """The questions, and a model with the documents that answer them."""
    model_folder = save_chat_model(tmp_path / "model", tokenizer, context_length=4500)
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    build_index(model_folder, Corpus(sorted(tmp_path.glob("*.txt"))), tmp_path / "store", keys="now")
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, ASKED)))
    return SimpleNamespace(questions=path, model=model_folder, store=tmp_path / "store", rows=tmp_path / "rows.jsonl")


def test_answers_are_compared_by_words_without_case_punctuation_and_articles():
    assert normalized("The  U.S. Court, a\ncourt") == "us court court"
    assert contains("It defaults to 64.", ["65", "64"])
    assert not contains("It defaults to 640.", ["64"])
    assert contains("in the Summer of 1521,", ["summer of 1521"])
    assert f1("The red kettle", "a red, red kettle") == pytest.approx(4 / 5)
    assert f1("nothing", "a red kettle") == 0


def test_a_sentence_and_its_document_count_apart(paths):
    with load(paths.model, [paths.store]) as lm:
        (row,) = bench_asking(lm, questions_of(paths.questions), paths.rows, ways=["shown"], by="words")
    assert (row["sentence_right"], row["source_right"], row["named"]) == (1 / 3, 2 / 3, 1)
    assert "right" not in row
    by_id = {row["id"]: row for row in map(json.loads, paths.rows.read_text().splitlines())}
    assert by_id["1"]["sentence"] == "The kettle of the office boils at 100 degrees."
    assert by_id["2"]["source"] == "gateway.txt:1"


def test_a_run_goes_on_behind_the_answers_that_are_there(paths, monkeypatch):
    questions, asked = questions_of(paths.questions), []
    ask = bench.ask
    monkeypatch.setattr(bench, "ask", lambda lm, question, way, **by: asked.append(way) or ask(lm, question, way, **by))
    options = {"ways": ["alone", "default"], "by": "words"}
    with load(paths.model, [paths.store]) as lm:
        whole = bench_asking(lm, questions, paths.rows, **options)
        lines = paths.rows.read_text().splitlines(keepends=True)
        assert (len(asked), len(lines)) == (6, 6)
        paths.rows.write_text("".join(lines[:5]) + lines[5][:20])  # killed while it wrote
        again = bench_asking(lm, questions, paths.rows, **options)
        assert len(asked) == 7
        shares = ("way", "questions", "right", "right_error", "logprob", "as_alone")
        assert [[row[name] for name in shares] for row in again] == [[row[name] for name in shares] for row in whole]
        bench_asking(lm, questions, paths.rows, **options)
        assert len(asked) == 7
        bench_asking(lm, questions, paths.rows, ways=["alone"], by="auto", limit=2)
        assert len(asked) == 9  # another search is another answer
    assert [row["as_alone"] for row in whole] == [1, 0]


def test_all_ways_ask_and_the_right_passage_is_one_that_answers(paths):
    (question, *_) = questions = questions_of(paths.questions)
    with load(paths.model, [paths.store]) as lm:
        rows = {row["way"]: row for row in bench_asking(lm, questions, paths.rows, by="words", limit=1)}
        passage = right_passage(lm, question)
    assert set(rows) == set(WAYS)
    assert rows["alone"]["named"] == rows["datastore"]["named"] == 0
    assert rows["right passage"]["source_right"] == 1
    assert passage is not None
    assert passage.document_id == "kettle.txt"


def test_a_mixture_weighs_the_log_probabilities_of_its_prompts(paths):
    """The weight that explains one answer explains another, whatever the prior is."""
    question = questions_of(paths.questions)[0].text
    with load(paths.model, [paths.store]) as lm:
        passages = [*lm.find_passages(question, k=1)]

        def of(answer, passages, **options):
            return math.exp(logprob(lm, question, passages, options, answer))

        shares = []
        for answer in ("100", "the red kettle"):
            behind, bare = of(answer, passages, use_store=False), of(answer, [], num_passages=0, use_store=False)
            shares.append((of(answer, passages, mixture=True) - bare) / (behind - bare))
    assert shares[0] == pytest.approx(shares[1], rel=0.01)
    assert 0 < shares[0] < 1


def test_the_source_of_a_mixture_is_its_heaviest_passage():
    def answer(*shares):
        return SimpleNamespace(passage_shares=shares, passages=("first", "second"))

    assert source_of(answer()) == "first"
    assert source_of(answer(0.2, 0.5)) == "second"
    assert source_of(answer(0.2, 0.3)) is None  # the model alone has 0.5
    assert source_of(SimpleNamespace(passage_shares=(), passages=())) is None


def test_errors_are_over_the_documents_that_answer():
    def row(name, right, about):
        return {"id": name, "documents": about, "right": right, "source": "a", "text": name} | dict.fromkeys(
            bench.TIMES, 1.0
        )

    rows = [row("1", True, ["a"]), row("2", True, ["a"]), row("3", False, ["b"]), row("4", False, ["b"])]
    (two,) = table({("default", each["id"]): each for each in rows}, ["default"])
    (four,) = table({("default", each["id"]): {**each, "documents": []} for each in rows}, ["default"])
    assert two["right"] == four["right"] == 0.5
    assert two["right_error"] == pytest.approx(0.5)
    assert four["right_error"] == pytest.approx(math.sqrt(1 / 12))


def test_questions_in_other_words_keep_their_answers(paths, tmp_path):
    words = tmp_path / "words.jsonl"
    words.write_text(json.dumps({"id": "2", "question": "What is the number of the door?"}))
    (question,) = questions_of(paths.questions, words)
    assert (question.text, question.answers) == ("What is the number of the door?", ("1234",))
    words.write_text(json.dumps({"id": "5", "question": "?"}))
    with pytest.raises(InvalidInput, match="id 5"):
        questions_of(paths.questions, words)


def test_the_command_prints_a_table_and_refuses_what_it_does_not_know(paths):
    command = ["asking", str(paths.questions), "--model", str(paths.model), "--store", str(paths.store)]
    command += ["--rows", str(paths.rows), "--encoder", "none"]
    result = CliRunner().invoke(app, [*command, "--way", "shown"])
    assert result.exit_code == 0, result.output
    assert "67%" in result.stdout
    assert isinstance(CliRunner().invoke(app, [*command, "--way", "guess"]).exception, InvalidInput)
    paths.questions.write_text(json.dumps({**ASKED[0], "document_id": "elsewhere.txt"}))
    assert isinstance(CliRunner().invoke(app, [*command, "--way", "shown"]).exception, InvalidInput)


def test_the_questions_of_the_project_differ_and_those_without_an_answer_name_no_document():
    none = questions_of(FOLDER / "unanswerable.jsonl")
    assert len({each.text for each in none}) == len({each.id for each in none}) == 100
    assert not any(each.answers or each.documents for each in none)
    words = [json.loads(line) for line in (FOLDER / "paraphrases.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in words}) == len({row["question"] for row in words}) == 100
