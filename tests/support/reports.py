"""Reads the report that `memlm bench ... --json` prints."""

import json
from typing import Any


def figures_of(stdout: str) -> dict[str, Any]:
    """Settings and results of a report by name."""
    report = json.loads(stdout)
    return report["settings"] | {result["metric"]: result["value"] for result in report["results"]}
