"""Proposals come from the files that stand in a relation to the hole's file, and never hold the hole."""

import numpy as np
import pytest

from memlm.errors import InvalidInput
from memlm.prompting.proposals import Proposal, ProposalRanker, helps, hole_prompt, proposals

FILES = {
    "app/ports.py": "import os\nfrom app.base import Gate\n\n\nclass Port(Gate):\n    number: int = 7443\n\n"
    "    def open(self):\n        return SECRET\n\n    def close(self):\n        return 'closed'\n",
    "app/base.py": "class Gate:\n    def lift(self):\n        return 1\n",
    "app/roof.py": "WIND = 40\n\n\ndef shut():\n    return WIND\n",
    "tests/test_ports.py": "def test_port_is_open():\n    assert True\n",
    "other/far.py": "FAR = 1\n",
}
BEGIN = FILES["app/ports.py"].index("SECRET")
END = BEGIN + len("SECRET")


def found(path: str = "app/ports.py", begin: int = BEGIN, end: int = END) -> dict[tuple[str, str], str]:
    return {(each.source, each.kind): each.text for each in proposals(FILES, path, begin, end)}


def test_each_source_and_kind_has_its_text():
    texts = found()
    assert texts["current", "imports"] == "import os\nfrom app.base import Gate"
    assert texts["current", "names"] == "class Port(Gate):\n    def open(self):\n    def close(self):"
    assert texts["current", "fields"] == "    number: int = 7443"
    assert texts["current", "strings"] == "'closed'"
    assert texts["current", "after"] == "\n\n    def close(self):\n        return 'closed'\n"
    assert texts["imports", "bodies"] == "    def lift(self):\n        return 1"
    assert texts["parents", "names"] == "class Gate:\n    def lift(self):"
    assert texts["siblings", "fields"] == "WIND = 40"
    assert texts["siblings", "identifiers"] == "class Gate def lift self return WIND shut"
    assert texts["similar", "names"] == "def test_port_is_open():"
    assert not {text for text in texts.values() if "FAR" in text}


def test_no_proposal_holds_the_hole():
    texts = found()
    assert len(texts) > 10
    assert not [place for place, text in texts.items() if "SECRET" in text or "return ret" in text]
    assert all("SECRET" not in text for text in found(end=len(FILES["app/ports.py"])).values())


def test_a_line_that_the_hole_cuts_gives_no_half_of_a_name():
    texts = found(begin=BEGIN + 2)
    assert "SE" not in texts["current", "identifiers"].split()
    assert texts["current", "names"] == found()["current", "names"]


def test_imports_are_those_of_the_named_package():
    files = {"a.py": "from app import base\n\nx = 1\n", "app/base.py": "Y = 1\n", "other/base.py": "Z = 2\n"}
    texts = {each.text for each in proposals(files, "a.py", 25, 26) if each.source == "imports"}
    assert texts == {"Y = 1"}


def test_a_hole_outside_of_the_files_is_refused():
    for path, begin, end, field in (
        ("none.py", 0, 1, "path"),
        ("app/base.py", 5, 2, "begin"),
        ("app/base.py", 0, 999, "end"),
    ):
        with pytest.raises(InvalidInput) as error:
            proposals(FILES, path, begin, end)
        assert error.value.field == field


@pytest.mark.parametrize(
    ("proposed", "before", "expected"),
    [(9, 9, [0, 1, 2, 106, 107, 108]), (2, 9, [0, 1, 105, 106, 107, 108]), (9, 2, [0, 1, 2, 3, 100, 101])],
)
def test_half_of_the_budget_is_the_proposals(proposed, before, expected):
    assert hole_prompt(range(proposed), range(100, 100 + before), 6) == expected


def test_half_of_a_tiny_budget_is_nothing():
    assert hole_prompt([1], [2], 1) == [2]
    assert hole_prompt([1, 2], [], 1) == [1]


def test_a_ranker_is_the_minimum_of_the_penalized_cross_entropy():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 3))
    labels = (features @ [2.0, -1.0, 0.0] + 0.5 + rng.logistic(size=200)) > 0
    ranker = ProposalRanker.fit(features.tolist(), labels.tolist())

    def objective(weights, bias):
        scores = features @ weights + bias
        return np.logaddexp(0, np.where(labels, -scores, scores)).sum() + (weights**2).sum() / 2

    best = objective(ranker.weights_F, ranker.bias)
    for number in range(4):
        for change in (-1e-3, 1e-3):
            moved = np.append(ranker.weights_F, ranker.bias)
            moved[number] += change
            assert objective(moved[:3], moved[3]) > best
    items = [Proposal("current", "after", "", tuple(row)) for row in features[:5]]
    expected = 1 / (1 + np.exp(-(features[:5] @ ranker.weights_F + ranker.bias)))
    assert ranker.chances(items) == pytest.approx(expected.tolist())
    with pytest.raises(InvalidInput, match="0 proposals and 0 labels"):
        ProposalRanker.fit([], [])


def test_the_ranker_learns_which_proposals_help():
    items = proposals(FILES, "app/ports.py", BEGIN, END)
    labels = helps(lambda prompt, hole: 1.0 - (prompt.count("WIND") > 0), items, "return ", "WIND")
    assert labels == ["WIND" in each.text for each in items]
    assert {*labels} == {True, False}
    ranker = ProposalRanker.fit([each.features for each in items], labels, l2=0.01)
    chances = ranker.chances(items)
    assert min(chance for chance, label in zip(chances, labels, strict=True) if label) > max(
        chance for chance, label in zip(chances, labels, strict=True) if not label
    )
