"""Holes of a repository, and which of its texts lower their loss."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from memlm.bench import proposals as bench
from memlm.bench.proposals import PREFIX, WAYS, Hole, Measured, bench_proposals, compare, holes, measure
from memlm.cli.app import app
from memlm.errors import InvalidInput
from memlm.language_model import load
from memlm.prompting.proposals import Proposal, hole_prompt, proposals

FILES = {
    "gate.py": "import os\n\nPORT_OF_THE_GATE = 7443\n\n\ndef listen(port):\n    return os.open(port)\n",
    "use.py": "from gate import listen\n\n# a comment of a line\n    print(listen(PORT_OF_THE_GATE))\nx = 1\n",
}


def test_holes_are_the_second_halves_of_long_lines_of_code():
    found = list(holes(FILES, 0))
    assert len(found) == 5
    for each in found:
        line = next(line for line in FILES[each.path].splitlines() if FILES[each.path][each.begin : each.end] in line)
        assert line.rstrip().endswith(FILES[each.path][each.begin : each.end])
        assert each.end - each.begin == -(-len(line.strip()) // 2)
    assert list(holes(FILES, 0)) == found != list(holes(FILES, 1))


def test_a_hole_is_scored_behind_each_prompt(model_folder):
    hole = next(each for each in holes(FILES, 0) if each.path == "use.py")
    with load(model_folder) as lm:
        got = measure(lm.checkpoint, FILES, hole, 24)
        text, before = FILES[hole.path][hole.begin : hole.end], lm.tokenize(FILES[hole.path][: hole.begin])
        assert got.found == proposals(FILES, hole.path, hole.begin, hole.end)
        assert len(got.with_each) == len(got.found) > 3
        assert got.num_tokens == len(lm.tokenize(text))

        def nats(prompt: list[int]) -> float:
            return -sum(
                float(lm.logits([*lm.tokenizer.framed(prompt, as_document=False), *lm.tokenize(text)])
                      .log_softmax(dim=-1)[-1 - got.num_tokens + place, token])
                for place, token in enumerate(lm.tokenize(text))
            )  # fmt: skip

        assert got.alone == pytest.approx(nats([]), rel=1e-3)
        assert got.prefix == pytest.approx(nats(hole_prompt([], before, 24)), rel=1e-3)
        last = nats(hole_prompt(lm.tokenize(f"{got.found[-1].text}\n"), before, 24))
        assert got.with_each[-1] == pytest.approx(last, rel=1e-3)
        assert last != pytest.approx(got.prefix, rel=1e-3)


def test_the_ranker_learns_from_the_other_half_of_the_files():
    """Names of siblings always help, the lines behind the hole never."""
    found = (Proposal("current", "after", "", (1.0, 0.0)), Proposal("siblings", "names", "", (0.0, 1.0)))
    measured = [Measured(Hole(f"{n % 6}.py", 0, 4), 2, found, 9.0, 6.0 + n, (7.0 + n, 4.0 + n)) for n in range(12)]
    rows = {row["way"]: row for row in compare(measured)["rows"]}
    assert tuple(rows) == WAYS
    prefix = np.mean([6.0 + number for number in range(12)]) / 2
    assert rows[PREFIX]["nats_per_token"] == pytest.approx(prefix)
    less = {way: row["nats_less"] for way, row in rows.items()}
    assert less == pytest.approx(
        {"no context": prefix - 4.5, PREFIX: 0, "by rule": -0.5, "by ranker": 1.0, "best of all": 1.0}
    )
    assert compare(measured)["share_that_helps"] == 0.5


def test_a_hole_without_proposals_has_its_prefix_as_the_best_of_all():
    found = (Proposal("current", "after", "", (1.0, 0.0)),)
    measured = [Measured(Hole(f"{n}.py", 0, 4), 2, found, 9.0, 6.0, (5.0,)) for n in range(4)]
    measured.append(Measured(Hole("4.py", 0, 4), 2, (), 9.0, 6.0, ()))
    rows = {row["way"]: row for row in compare(measured)["rows"]}
    assert rows["best of all"]["nats_per_token"] == pytest.approx((4 * 5.0 + 6.0) / 10)


def test_hidden_folders_are_not_read(tmp_path, model_folder):
    repository = tmp_path / ".work" / "repository"  # only folders below it count
    (repository / ".venv" / "lib").mkdir(parents=True)
    for name, text in FILES.items():
        (repository / name).write_text(text)
    (repository / ".venv" / "lib" / "other.py").write_text(FILES["gate.py"])
    (repository / ".hidden.py").write_text(FILES["gate.py"])
    figures = bench_proposals(model_folder, repository, budget=24)
    assert (figures["files"], figures["holes"]) == (2, 5)


def test_the_command_reports_every_way(tmp_path, model_folder):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    command = ["bench", "proposals", str(tmp_path), "--model", str(model_folder), "--budget", "24", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["settings"]["holes"] == 5
    names = {each["metric"] for each in report["results"]}
    assert {f"nats_per_token[way={way}]" for way in WAYS} < names
    printed = CliRunner().invoke(app, command[:-1]).stdout
    assert "best of all" in printed
    assert "5 holes" in printed


def test_too_few_files_and_holes_are_refused(tmp_path, model_folder, monkeypatch):
    (tmp_path / "one.py").write_text(FILES["gate.py"])
    with pytest.raises(InvalidInput, match="1 files of Python"):
        bench_proposals(model_folder, Path(tmp_path))
    (tmp_path / "two.py").write_text("x = 1\n")
    monkeypatch.setattr(bench, "LEAST_HOLES", 6)
    with pytest.raises(InvalidInput, match="3 holes were read"):
        bench_proposals(model_folder, Path(tmp_path), budget=24)
