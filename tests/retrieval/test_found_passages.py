"""A found passage names its place as a person would, and texts that are nearly the same count once."""

import random
from dataclasses import replace
from typing import NamedTuple

import pytest

from memlm.api.passages import Passage
from memlm.data.corpus import Corpus, Document
from memlm.indexing.build import add_to_index, build_index
from memlm.language_model import LanguageModel, load
from memlm.retrieval import found_passages
from memlm.retrieval.found_passages import (
    EXAMINED,
    EXAMINED_EACH,
    MOST_ALSO,
    MOST_COPIES,
    are_nearly_same,
    groups_of,
    runs_of,
)

GUIDE = "Before.\n\n# Guide\n\nIntro of the guide.\n\n## Creating branches\n\nA zebra makes a branch.\n"
BOOK = "First.\n\nNothing here.\f# Second\n\nA zebra on two and\n\fon page three.\n\f\n# Last\n\nA gnu,\fa gnu."
PASSAGE = Passage("s", "a", "a", 0, 9, "text", 1.0)


@pytest.fixture
def found(model_folder, tmp_path):
    """Stores some documents, and finds passages of them."""
    opened = list[LanguageModel]()

    def find(*documents: Document, question: str = "zebra", **options) -> tuple[Passage, ...]:
        if opened:
            opened.pop().close()
        store = tmp_path / f"store-{random.random()}"
        build_index(model_folder, Corpus(list(documents[:2])), store, keys="none")
        if documents[2:]:
            add_to_index(model_folder, Corpus(list(documents[2:])), store)
        opened.append(load(model_folder, [store]))
        return opened[0].find_passages(question, by="words", **options)

    yield find
    for each in opened:
        each.close()


def test_a_passage_has_the_headings_above_it(found):
    (passage,) = found(Document("guide.md", GUIDE), k=1)
    assert passage.headings == ("Guide", "Creating branches")
    assert passage.text == "## Creating branches\n\nA zebra makes a branch."
    assert (passage.first_line, passage.last_line, passage.place) == (7, 9, "guide.md:7-9")
    (passage,) = found(Document("guide.html", GUIDE, metadata={"format": "html"}), k=1)
    assert passage.place == "guide.html, Creating branches"
    (passage,) = found(Document("guide.txt", GUIDE), k=1)
    assert passage.headings == ()


def test_front_matter_is_in_no_passage_and_lines_count_it(found, tmp_path):
    (tmp_path / "leave.md").write_text("---\ntitle: Okapi\ntags: [zebra, gnu]\n---\n\nTen days of leave.\n")
    (document,) = Corpus([tmp_path / "leave.md"])
    (passage,) = found(document, Document("other.txt", "Of a horse."), question="okapi")
    assert (passage.title, passage.text, passage.place) == ("Okapi", "Ten days of leave.", "leave.md:6")
    assert found(document, question="zebra") == ()
    unread = Document("note.md", document.text)  # whose fields are its text only
    assert found(unread, question="zebra")[0].first_line == 1


def test_a_title_and_headings_are_searched_with_the_text_below(found):
    documents = Document("a.md", GUIDE.replace("zebra", "horse"), title="Okapi"), Document("b.md", "A branch.")
    (passage,) = found(*documents, question="creating", k=1)
    assert passage.headings[-1] == "Creating branches"
    assert {each.document_id for each in found(*documents, question="okapi")} == {"a.md"}
    first, *_ = found(*documents, question="guide horse")
    assert "horse" in first.text


@pytest.mark.parametrize(("form", "word"), [("pdf", "page"), ("pptx", "slide"), ("xlsx", "sheet")])
def test_pages_are_counted_by_form_feeds_where_the_format_has_pages(found, form, word):
    book = Document("book", BOOK, metadata={"format": form})
    (passage,) = found(book, k=1)
    assert (passage.first_page, passage.last_page, passage.place) == (2, 3, f"book, {word}s 2-3")
    (passage,) = found(book, question="gnu", k=1)
    assert (passage.first_page, passage.last_page, passage.place) == (4, 5, f"book, {word}s 4-5")
    (passage,) = found(Document("one", "A zebra.", metadata={"format": form}), k=1)
    assert passage.place == f"one, {word} 1"
    (passage,) = found(Document("one", "\f\n\fA zebra.", metadata={"format": form}), k=1)
    assert passage.place == f"one, {word} 3"
    (passage,) = found(Document("book", BOOK), k=1)
    assert (passage.first_page, passage.last_page) == (0, 0)


def test_a_place_is_the_document_alone_where_no_more_is_known():
    assert PASSAGE.place == "a"
    assert replace(PASSAGE, first_line=3, last_line=3).place == "a:3"
    assert replace(PASSAGE, metadata={"format": "mail"}, first_line=3).place == "a"
    assert replace(PASSAGE, metadata={"format": ["html"]}, first_line=3).place == "a:3"


def test_equal_and_nearly_equal_texts_count_once_and_name_their_places(found):
    text = " ".join(f"word{number}" for number in range(60)) + " zebra"
    copies = [Document(f"{number}", text) for number in range(4)]
    nearly, other = Document("5", text.replace("word7 ", "WORD 7 ")), Document("6", text.replace("word1", "gnu"))
    passages = found(*copies, nearly, other, k=2)
    assert {each.document_id: each.also for each in passages} == {"0": ("1:1", "2:1", "3:1", "5:1"), "6": ()}
    (passage,) = found(*copies, nearly, k=1)
    assert passage.also[:3] == ("1:1", "2:1", "3:1")
    many = [Document(f"{number:02d}", text) for number in range(30)]
    (passage,) = found(*many, k=5)
    assert passage.also == tuple(f"{number:02d}:1" for number in range(1, 1 + MOST_ALSO))


def test_texts_are_nearly_the_same_by_the_share_of_their_runs_of_words():
    rng = random.Random(0)
    assert runs_of("One two; three. Four") == {("one", "two", "three"), ("two", "three", "four")}
    assert runs_of("a b") == {("a", "b")}
    assert runs_of("") == {()}
    for _ in range(300):
        words = [f"w{number}" for number in range(rng.randint(1, 120))]
        changed = [word if rng.random() > 0.02 else "other" for word in words][rng.randint(0, 3) :]
        one, two = runs_of(" ".join(words)), runs_of(" ".join(changed))
        assert are_nearly_same(one, two) == (len(one & two) / len(one | two) >= 0.9)
        assert are_nearly_same(two, one) == are_nearly_same(one, two)


def test_copies_of_one_text_keep_no_other_text_from_being_found(found):
    text = "The zebra license grants the zebra a right to the zebra park."
    copies = [Document(f"{number:03}", text) for number in range(EXAMINED + 3 * EXAMINED_EACH + 1)]
    others = [Document(each, f"One {each} story of a zebra that ran far away to {each} town.") for each in ("xa", "xb")]
    passages = found(*copies, *others, question="zebra license park", k=3)
    assert [each.document_id for each in passages] == ["000", "xa", "xb"]


class Text(NamedTuple):
    """A passage, and its place."""

    place: int
    text: str


def compared_with_all(found: list[Text], k: int) -> list[list[Text]]:
    groups = list[list[Text]]()
    for each in found:
        own = runs_of(each.text)
        same = next((group for group in groups if are_nearly_same(own, runs_of(group[0].text))), None)
        if same is not None:
            same += [each] * (len(same) <= MOST_ALSO)
        elif len(groups) < k:
            groups.append([each])
        else:
            break
    return groups


@pytest.mark.parametrize("seed", range(12))
def test_groups_are_those_of_comparing_with_every_group(seed):
    rng, texts = random.Random(seed), list[Text]()
    starts = [[f"{rng.choice('abc')}{number % 40}" for number in range(rng.randint(1, 90))] for _ in range(8)]
    for place in range(120):
        words = [word if rng.random() > rng.choice([0, 0.01, 0.03, 0.2]) else "other" for word in rng.choice(starts)]
        texts.append(Text(place, " ".join(words[rng.randint(0, 2) :])))
    for k in (1, 3, 20, 64):
        assert groups_of(texts, k) == compared_with_all(texts, k)


def test_each_text_is_compared_with_few_of_many(monkeypatch):
    compared = list[None]()
    monkeypatch.setattr(
        found_passages, "are_nearly_same", lambda *texts: compared.append(None) or are_nearly_same(*texts)
    )
    monkeypatch.setattr(found_passages, "MOST_COMPARED", 2)
    line = " ".join(f"navigation{number}" for number in range(30))
    texts = [Text(each, f"{line} " + " ".join(f"w{each}x{number}" for number in range(30))) for each in range(300)]
    assert len(groups_of(texts, 300)) == 300
    assert compared == []
    shared = " ".join(f"s{number}" for number in range(100))
    alike = [Text(each, f"{shared} " + " ".join(f"w{each}x{number}" for number in range(6))) for each in range(300)]
    assert len(groups_of(alike, 300)) == 300
    assert 0 < len(compared) <= 2 * len(alike)


def test_the_passages_that_are_read_are_bounded():
    read, text = list[Text](), " ".join(f"w{number}" for number in range(2000))

    def endless(texts):
        for number in range(1 << 30):
            read.append(Text(number, texts(number)))
            yield read[-1]

    assert len(groups_of(endless(lambda _: text), 2)) == 1
    assert len(read) == 1 + MOST_COPIES
    read.clear()
    assert len(groups_of(endless(lambda number: f"{text} {number}"), 2)) == 1
    assert len(read) == EXAMINED + 2 * EXAMINED_EACH
