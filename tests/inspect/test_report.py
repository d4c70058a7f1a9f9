"""The report is one page without scripts or foreign files, whose drawings are XML with a mark for each head."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from planted_heads import INDUCTION, inspect_plainly, planted

from memlm.cli.terminal.console import jsonable
from memlm.inspect import Inspection, inspect_model, report_html
from memlm.inspect.inspection import Vocabulary, inspect_decoder
from memlm.model.files.checkpoint import Checkpoint

HOSTILE = '<script>alert("1")</script>&'


@pytest.fixture(scope="module")
def found() -> Inspection:
    vocabulary = Vocabulary(range(16), name=lambda token: HOSTILE if token % 2 else f" t{token}")
    inspection = inspect_decoder(planted(), vocabulary, text_ids=[1, 2, 3, 4])
    return replace(inspection, model=HOSTILE)


@pytest.fixture(scope="module")
def page(found: Inspection) -> str:
    return report_html(found)


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]


def marks(drawing: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [each for each in drawing.iter() if each.get("class") == kind]


def test_nothing_is_loaded_and_nothing_runs(page):
    assert "<script" not in page
    assert not re.findall(r"(?:src|href)=|url\(|@import", page)
    assert "prefers-color-scheme:dark" in page
    assert HOSTILE not in page
    assert len(page) < 2_000_000


def test_no_number_is_missing(page):
    assert not re.findall(r"\bnan\b|\binf\b|\bNone\b", page)


def test_grids_have_a_cell_for_each_head_with_its_number(found, page):
    grids = [drawing for drawing in drawings(page) if len(marks(drawing, "cell")) == len(found.heads)]
    assert len(grids) == 7  # all scores but retrieval's
    induction = next(drawing for drawing in grids if drawing.findtext("{*}title") == "Induction")
    titles = [mark.findtext("{*}title") for mark in marks(induction, "cell")]
    score = next(head.induction for head in found.heads if head.id == INDUCTION)
    assert titles[INDUCTION[0] * 4 + INDUCTION[1]] == f"layer 1, head 2: {score:.3f}"
    assert len(marks(induction, "ring")) == 1


def test_the_circuit_is_drawn_from_head_to_head(page):
    drawing = next(d for d in drawings(page) if d.findtext("{*}title") == "Earlier heads that later ones read")
    titles = [arc.findtext("{*}title") for arc in marks(drawing, "arc")]
    assert any(title.startswith("0.0 previous token → 1.2 induction, copying: K ") for title in titles)


def test_maps_show_the_texts_with_their_tokens(found, page):
    assert [shown.text for shown in found.maps] == ["random tokens, repeated"] * 6 + ["the given text"] * 6
    assert found.maps[-1].tokens == (HOSTILE, " t2", HOSTILE, " t4")
    assert all(len(row) == at + 1 for shown in found.maps for at, row in enumerate(shown.weights))
    assert "Attention in the given text" in page


def test_json_has_all_that_the_report_has(found):
    answer = json.loads(json.dumps(jsonable(found), allow_nan=False))
    assert answer["heads"][6]["roles"] == ["induction", "copying"]
    assert answer["advice"]["layers"] == [1]


def test_a_model_without_any_role_has_a_report(checkpoint: Checkpoint):
    found = inspect_model(checkpoint, "the gateway of the office")
    page = report_html(found)
    assert found.model == "tiny"
    assert "No head reaches the threshold of a role." in page
    assert "None. No head looks for earlier text by its content." in page
    assert all(head.retrieval is None for head in found.heads)  # its context has no room for a sentence


def test_an_inspection_is_reproducible():
    assert inspect_plainly(planted()) == inspect_plainly(planted())
    assert inspect_plainly(planted()).losses != inspect_plainly(planted(), seed=1).losses
