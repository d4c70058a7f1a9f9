"""The program in benchmarks/: a command runs, the pages of its results are fresh, each file has a report's fields."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from reports import figures_of
from typer.testing import CliRunner

from benchmarks.commands import app
from benchmarks.pages import evidence_papers, plot_evidence
from benchmarks.pages.report import load, rows_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
FIELDS = {"command", "commit", "date", "versions", "machine", "settings", "results"}


def run_page(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.pages.{name}", "--check"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_command_shows_a_table_or_a_report(model_folder, corpus_folder, tmp_path):
    command = ["datastore", str(corpus_folder), "--held-out", str(corpus_folder / "doc-1.txt")]
    command += ["--model", str(model_folder), "--work", str(tmp_path), "--entries", "300", "--index", "Flat"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "Flat" in result.stdout
    figures = figures_of(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert figures["recall_k32[entries=300,index=Flat]"] == 1.0


def test_each_command_says_what_it_measures():
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        assert name in shown.output
        assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


def test_the_page_of_benchmarks_is_fresh() -> None:
    done = run_page("report", ROOT)
    assert done.returncode == 0, done.stderr


def test_the_tables_of_the_evidence_are_fresh() -> None:
    done = run_page("plot_evidence", ROOT)
    assert done.returncode == 0, done.stderr


def test_the_summary_has_the_gain_of_each_domain() -> None:
    text = (ROOT / "docs/reports/evidence.md").read_text(encoding="utf-8")
    text = text.split("<!-- table: summary -->")[1].split("<!-- end -->")[0]
    gains = [
        result
        for file in RESULTS.glob("evidence-*.json")
        if file.stem.split("-")[1] not in plot_evidence.GROUPS
        for result in json.loads(file.read_text(encoding="utf-8"))["results"]
        if result["metric"].startswith("nats_less[table=gain-by-domain") and "way=adaptive_lam" in result["metric"]
    ]
    assert len(gains) >= 3
    for gain in gains:
        assert f"({-gain['value']:+.3f} ± {gain['high'] - gain['value']:.3f})" in text, gain["metric"]


@pytest.mark.parametrize("page", ["docs/reports/evidence.md", "benchmarks/tables/evidence.md"])
def test_a_changed_figure_of_the_evidence_is_stale(page: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    (tmp_path / "docs/reports").mkdir(parents=True)
    report = "docs/reports/evidence.md"
    shutil.copyfile(ROOT / report, tmp_path / report)
    assert run_page("plot_evidence", tmp_path).returncode == 0
    text = (tmp_path / page).read_text(encoding="utf-8")
    (tmp_path / page).write_text(text.replace(" ± 0.0", " ± 0.1", 1), encoding="utf-8")
    done = run_page("plot_evidence", tmp_path)
    assert done.returncode == 1
    assert f"{page} is stale" in done.stderr


def test_reports_of_a_group_have_tables_of_their_own() -> None:
    def report(gain: float) -> dict[str, object]:
        metric = "less[table=gain-by-domain-differences,text=books,way=one_lam against alone,documents=2]"
        return {"results": [{"metric": metric, "value": gain, "low": gain, "high": gain + 0.01}]}

    groups = plot_evidence.groups_of({"evidence-books": report(0.1), "evidence-inside-books": report(0.2)})
    assert [len(groups[name]) for name in ("", *plot_evidence.GROUPS)] == [1, 1, 0, 0, 0]
    name = "gain-by-domain-differences"
    page = "".join(f"<!-- table: {each} -->\n<!-- end -->\n" for each in (name, f"inside/{name}", f"trained/{name}"))
    whole, inside, trained = plot_evidence.filled(page, groups).split("<!-- end -->")[:3]
    assert "+0.100 ± 0.010" in whole
    assert "+0.200" not in whole
    assert "+0.200 ± 0.010" in inside
    assert "±" not in trained


def test_one_document_has_no_standard_error() -> None:
    row = {"text": "books", "way": "alone", "less": -0.25, "less_error": 0.0, "right": 0.5, "right_error": 0.0}
    for counts in ({"documents": 1}, {"questions": 1}, {"documents": 1, "questions": 7}):
        assert plot_evidence.with_error({**row, **counts}, "right", 2) == "0.50 ± –"
    for counts in ({"documents": 2, "questions": 2}, {"facts": 100}, {}):  # older results tell no number
        assert plot_evidence.with_error({**row, **counts}, "right", 2) == "0.50 ± 0.00"
    assert list(plot_evidence.table_of_differences([{**row, "documents": 1}]))[-1] == "| books | -0.250 ± – |"
    assert plot_evidence.percent({**row, "right_error": 0.021, "documents": 12}, "right") == "50 ± 2 %"
    assert plot_evidence.percent({**row, "documents": 1}, "right") == "50 ± – %"


def test_thresholds_of_tasks_are_told_apart_by_the_gain_that_they_keep() -> None:
    def rows(keep_gain: float, points: float) -> list[dict[str, object]]:
        task = {"text": "wikitext", "task": "local_piqa", "questions": 100, "right": 64.0, "right_error": 4.8}
        text = {"text": "wikitext", "task": "own text", "nats_less_error": 0.01, "left_alone": 0.5}
        more = {"points_more": points, "points_more_error": 0.3, "changed": 1.0}
        threshold = {"way": "thresholded_lam", "keep_gain": keep_gain}
        return [
            {**text, "way": "adaptive_lam", "nats_less": 0.2},
            {**text, **threshold, "nats_less": keep_gain / 5},
            {**task, "way": "alone", "points_more": 0.0, "points_more_error": 0.0},
            {**task, **more, **threshold},
        ]

    old, new = ([{**row, "table": "tasks"} for row in each] for each in (rows(0.9, 1.5), rows(0.95, -0.5)))
    for row in old:
        row.pop("keep_gain", None)  # results before the option kept 0.9
    lines = list(plot_evidence.table_of_tasks(old))
    assert "| adaptive λ with a threshold |" in lines[0]
    assert lines[-1] == "| WikiText-2 | piqa | 100 | 64.0 ± 4.8 | - | +1.50 ± 0.30 | 1.0 % |"
    lines = list(plot_evidence.table_of_tasks([*new, *old]))
    assert "| adaptive λ with a threshold (0.9) | adaptive λ with a threshold (0.95) |" in lines[0]
    assert lines[2:] == ["| WikiText-2 | piqa | 100 | 64.0 ± 4.8 | - | +1.50 ± 0.30 | -0.50 ± 0.30 | 1.0 % |"]
    text = list(plot_evidence.table_of_text_beside_tasks([*new, *old]))[2:]
    assert [each.split("|")[4].strip() for each in text] == ["100 %", "90 %", "95 %"]
    unfitted = [row for row in old if row["way"] == "alone"]  # where no adaptive λ was kept
    assert list(plot_evidence.table_of_tasks([*unfitted, {**unfitted[0], "way": "one_lam", "changed": 0.0}]))[
        -1
    ].endswith("0.0 % |")


def test_shares_of_tokens_that_lose_are_shown_where_a_result_has_them() -> None:
    old = {"text": "wikitext", "cut": "word name", "way": "adaptive_lam", "share_of_tokens": 0.2, "nats_less": 0.1}
    old |= {"nats_less_error": 0.02}
    assert list(plot_evidence.table_of_token_shares([old])) == ["The results do not have these shares yet."]
    shares = {"share_losing": 0.61, "share_losing_error": 0.034, "share_gaining": 0.25, "share_gaining_error": 0.02}
    lines = list(
        plot_evidence.table_of_token_shares([old, {**old, **shares, "text": "isabelle"}, {**old, "cut": "all tokens"}])
    )
    assert "| Isabelle | word: name | - | - | 61 ± 3 % | 25 ± 2 % |" in lines
    assert not any("WikiText-2" in line or "all tokens" in line for line in lines)
    whole = {**old, **shares, "cut": "all tokens"}
    assert "| WikiText-2 | all tokens | - | - | 61 ± 3 % | 25 ± 2 % |" in plot_evidence.table_of_token_shares([whole])
    assert next(line for line in plot_evidence.table_of_tokens([whole]) if "all" in line).endswith(
        "| 0.100 ± 0.020 | - |"
    )


def test_energy_is_shown_where_a_result_has_it() -> None:
    row: dict[str, object] = {"text": "wikitext", "way": "alone", "tokens_per_s": 9.0, "first_token_ms": 8.0}
    row |= {"time_over_alone": 1.0, "time_over_alone_low": 1.0, "time_over_alone_high": 1.0}
    assert "J" not in next(plot_evidence.table_of_cost([row]))
    names, _, *lines = plot_evidence.table_of_cost([row, {**row, "gpu_joules_per_token": 0.5}])
    assert names.endswith("| J of the GPU a token |")
    assert [line.split("|")[-2].strip() for line in lines] == ["-", "0.50"]


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_report_names_its_machine_and_its_origin(file: Path) -> None:
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report.keys() - {"converted"} == FIELDS
    assert {"processor", "instruction_sets", "cores"} <= report["machine"].keys()
    assert report["results"]
    if "converted" not in report:
        assert report["command"]
        assert report["commit"]
        assert report["date"]


def test_a_gain_beside_a_paper_is_a_share_of_the_perplexity() -> None:
    """Of each result that is compared: from the perplexities with and without memory, one standard error apart."""
    reports = {name: rows_of(report) for name, report in load().items()}
    for paper in evidence_papers.PAPERS:
        row = evidence_papers.nearest(paper, reports[paper.report])
        nats, less, error = (row[name] for name in ("nats_per_token", paper.metric, f"{paper.metric}_error"))
        alone, mixed, most = (math.exp(nats - each) for each in (0.0, less, less + error))
        gain, gain_error = evidence_papers.gain_of(row, paper.metric, 1.0)
        assert gain == pytest.approx(1 - mixed / alone, abs=1e-12)
        assert gain_error == pytest.approx((mixed - most) / alone, rel=0.1)
        per_word, word_error = evidence_papers.gain_of(row, paper.metric, 2.0)
        assert per_word == pytest.approx(1 - (mixed / alone) ** 2, abs=1e-12)
        assert word_error == pytest.approx((mixed / alone) ** 2 - (most / alone) ** 2, rel=0.1)


def test_gains_within_two_standard_errors_are_not_told_apart() -> None:
    verdicts = [evidence_papers.compared(gain, 0.02, 0.1) for gain in (0.05, 0.07, 0.1, 0.13, 0.15)]
    assert verdicts == ["worse", *3 * ["not told apart"], "better"]
