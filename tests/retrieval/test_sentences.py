"""A passage points at the sentence that has the most of what a question asks, in its place in the document."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from memlm.api.passages import Passage, Sentence
from memlm.base.phrases import forms_of, terms_of
from memlm.base.sentences import sentences_of
from memlm.data.corpus import Corpus, Document
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel, load
from memlm.retrieval.sentences import AskedWords, pointed_out

PORTS = (
    "The gateway of the office listens.\nIts port is 8443. The printers\nhave port 9100.\n\nNobody is there on Sunday."
)


def passage(text: str, **fields: object) -> Passage:
    return Passage("store", "notes.md", "", 0, 9, text, 1.0, **{"first_line": 3, **fields})


def by_loops(question: str, text: str, above: str, weights: dict[str, float]) -> str:
    """The sentence, by the definition."""
    best, most = "", -1.0
    for span in sentences_of(text):
        found = 0.0
        for forms in forms_of(question):
            is_in = set(forms) & set(terms_of(span.of(text)))
            if is_in and not set(forms) & set(terms_of(above)):
                found += weights[forms[0]]
        if found > most:
            best, most = span.of(text), found
    return best


@pytest.mark.parametrize(
    "question",
    ["Which port have the printers?", "port of the gateway", "Is somebody there on Sunday?", "who listens", "zebra"],
)
def test_it_is_the_sentence_whose_words_weigh_most(question: str) -> None:
    words = forms_of(question)
    weights = [1.0 + 0.37 * number for number in range(len(words))]
    for title in ("", "Ports of the office"):
        given = replace(passage(PORTS), title=title)
        found = AskedWords(words, weights).point_out(given).sentence
        assert found is not None
        by_form = {forms[0]: weight for forms, weight in zip(words, weights, strict=True)}
        assert found.text == by_loops(question, PORTS, title, by_form)
        assert PORTS[found.offset :].startswith(found.text)


def test_a_sentence_has_its_line_and_its_page() -> None:
    (found,) = pointed_out("Which port have the printers?", [passage(PORTS)])
    assert found.sentence == Sentence(
        "The printers\nhave port 9100.", PORTS.index("The printers"), 4, 0, found.sentence.words
    )
    assert found.sentence_place == "notes.md:4"
    assert found.place == "notes.md:3"
    pages = passage("One page.\fThe printers are here.", first_page=7, last_page=8, metadata={"format": "pdf"})
    (found,) = pointed_out("Where are the printers?", [pages])
    assert found.sentence_place == "notes.md, page 8"


def test_words_that_tell_little_are_not_shown() -> None:
    words = [("the",), ("printer",), ("port",)]
    found = AskedWords(words, [0.01, 2.0, 1.0]).point_out(passage("The printers have the port 9100."))
    assert found.sentence is not None
    assert found.sentence.words == ("printers", "port")


def test_a_heading_is_pointed_at_only_where_nothing_else_is() -> None:
    assert pointed_out("port", [passage("# Port\nIt is 8443.")])[0].sentence.text == "It is 8443."
    assert pointed_out("port", [passage("# Port")])[0].sentence.text == "# Port"
    assert pointed_out("port", [passage("  ")])[0].sentence is None
    code = "# Gate\nRead this page first.\n```sh\n# the port of the gate\nserve --port 7443\n```\n#7443 is mine."
    assert (
        pointed_out("port of the gate", [passage(code)])[0].sentence.text == "# the port of the gate\nserve --port 7443"
    )
    assert pointed_out("is it mine?", [passage(code)])[0].sentence.text == "#7443 is mine."


def test_what_a_caller_points_at_stays() -> None:
    given = replace(passage(PORTS), sentence=Sentence("Its port is 8443."))
    assert pointed_out("printers", [given, passage(PORTS)])[0] == given


@pytest.fixture(scope="module")
def documents(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    store = tmp_path_factory.mktemp("documents") / "store"
    texts = {"ports.md": f"# Ports\n\n{PORTS}", "zoo.md": "The zebra eats grass.\n\nThe lion does not.\n"}
    build_index(model_folder, Corpus([Document(*each) for each in texts.items()]), store, keys="none")
    with load(model_folder, [store]) as lm:
        yield lm


def test_passages_that_are_found_have_their_sentence(documents: LanguageModel) -> None:
    (first, *_) = documents.find_passages("Which port have the printers?", k=2)
    assert first.sentence is not None
    assert (first.sentence.text, first.sentence_place) == ("The printers\nhave port 9100.", "ports.md:4")
    assert first.text[first.sentence.offset :].startswith(first.sentence.text)
    assert {"printers", "port"} <= {*first.sentence.words}
