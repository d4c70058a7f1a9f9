"""The files of ops/ as tests read them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

OPS = Path(__file__).resolve().parents[2] / "ops"

LABELS = re.compile(r"\{([^}]*)\}")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
NAME = re.compile(r"[A-Za-z_:][\w:]*")
OPERATORS = {"and", "or", "unless", "offset", "bool", "group_left", "group_right"}


def alert_expressions() -> dict[str, str]:
    """The PromQL of each alert rule, by the alert's name."""
    rules = [rule for group in read_yaml("alerts.yaml")["groups"] for rule in group["rules"]]
    return {rule["alert"]: rule["expr"] for rule in rules}


def metrics_in(expression: str) -> dict[str, set[str]]:
    """The metrics that a PromQL expression names, with the labels that it wants of them."""
    grouped = {label.strip() for labels in GROUPING.findall(expression) for label in labels.split(",")} - {""}
    expression = re.sub(r"\[[^\]]*\]", "", GROUPING.sub("", expression))
    found = dict[str, set[str]]()
    for name, matchers in re.findall(rf"({NAME.pattern})(?:{LABELS.pattern})?(?!\s*\(|[\w:])", expression):
        if name not in OPERATORS:
            labels = {matcher.split("=")[0].rstrip("!").strip() for matcher in matchers.split(",") if matcher.strip()}
            found.setdefault(name, set()).update(labels | grouped)
    return found


def documented_metrics() -> set[str]:
    """The metrics in the table of docs/operation.md."""
    return set(re.findall(r"`(memlm_\w+)`", (OPS.parent / "docs" / "operation.md").read_text()))


def read_yaml(name: str) -> Any:
    return yaml.safe_load((OPS / name).read_text())


def dashboard_expressions() -> dict[str, str]:
    """The PromQL of the dashboard's panels and variables, by their titles."""
    dashboard = json.loads((OPS / "grafana.json").read_text())
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    }
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
            found[variable["name"]] = f"sum by ({label}) ({metric})"
    return found
