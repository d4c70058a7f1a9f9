"""Reports of benchmarks: the page that they are rendered to is fresh, and every file has the fields of a report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
FIELDS = {"command", "commit", "date", "versions", "machine", "settings", "results"}


def test_the_page_of_benchmarks_is_fresh() -> None:
    done = subprocess.run([sys.executable, FOLDER / "report.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_tables_of_the_evidence_are_fresh() -> None:
    done = subprocess.run([sys.executable, FOLDER / "plot_evidence.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_a_report_names_its_machine_and_its_origin(file: Path) -> None:
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report.keys() - {"converted"} == FIELDS
    assert {"processor", "instruction_sets", "cores"} <= report["machine"].keys()
    assert report["results"]
    if "converted" not in report:
        assert report["command"]
        assert report["commit"]
        assert report["date"]
