"""`python -m benchmarks questions` counts answers in passages of the documents that answer."""

import json

from typer.testing import CliRunner

from benchmarks.commands import app
from benchmarks.questions import bench_questions, questions_of
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.indexing.build import build_index
from memlm.language_model import load

TEXTS = {
    "a.txt": "The kettle boils at 100 degrees.",
    "b.txt": "The kettle is red. The kettle is old. The kettle is loud.",
    "c.txt": "Another thing boils at 100 degrees.",
}


def test_an_answer_counts_in_a_document_that_answers_up_to_its_rank(tmp_path, model_folder):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    build_index(model_folder, Corpus(sorted(tmp_path.glob("*.txt"))), tmp_path / "store", keys="none")
    asked = [
        {"question": "kettle boils", "answers": ["100  Degrees", "212"], "files": ["html/a.html"], "kind": "same"},
        {"question": "kettle red loud old", "answers": ["100 degrees"], "files": ["a.html"], "kind": "same"},
        {"question": "kettle boils", "answers": ["200 degrees"], "document_id": "a.txt", "kind": "other"},
        {"question": "kettle boils", "answers": ["100 degrees"], "document_id": "elsewhere.txt", "kind": "other"},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, asked)))
    with load(model_folder, [tmp_path / "store"]) as lm:
        rows = {row["kind"]: row for row in bench_questions(lm, questions_of(path), ways=["words"])["rows"]}
    shares = {kind: [row[f"first_{most}"] for most in (1, 3, 8)] for kind, row in rows.items()}
    assert shares == {"all": [1 / 3, 2 / 3, 2 / 3], "same": [0.5, 1, 1], "other": [0, 0, 0]}
    assert [rows[kind]["questions"] for kind in ("all", "same", "other")] == [3, 2, 1]
    command = ["questions", str(path), "--model", str(model_folder), "--store", str(tmp_path / "store")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "67%" in result.stdout
    path.write_text(json.dumps(asked[-1]))
    assert isinstance(CliRunner().invoke(app, command).exception, InvalidInput)
