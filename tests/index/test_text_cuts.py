"""Passages begin where the text does: as the plain rules say, in any window, for tokens that hold any bytes."""

import random
from collections.abc import Collection

import numpy as np
import pytest
from passage_cuts import cuts_by_lines

from memlm.index.store.derived import text_cuts
from memlm.index.store.derived.text_blocks import is_markdown
from memlm.index.store.derived.text_cuts import Cut, Cutter

FRAGMENTS = [
    "# One\n", "## Two ##\n", "### Three\n", "\n", "\n\n", "A sentence here. ", "Another one! ", "e.g. this  and, ",
    "- item one\n", "* item\n", "12. number ", "```\n", "```py\n", "~~~\n", "| a | b |\n", "| c. D | d |\n",
    "    code line;\n", "Title\n=====\n", "=====\nOver\n=====\n", "Sub\n---\n", "\f", "word ", "Wörter über ", "über ",
    "  ## Deep\n", " Title\n=====\n", "東京は大きい。", "京都", "x" * 30, " ", "  ", "\t", "\r\n", "# ", "#", "---\n",
    "🙂",
]  # fmt: skip


class Tokens:
    """A text as tokens of some lengths, which cut characters, and what decodes them."""

    def __init__(self, text: str, lengths: list[int], rng: random.Random) -> None:
        content, begin, self.pieces = text.encode(), 0, list[bytes]()
        while begin < len(content):
            end = begin + rng.choice(lengths)
            self.pieces.append(content[begin:end])
            begin = end
        self._vocabulary = sorted(set(self.pieces))
        places = {piece: number for number, piece in enumerate(self._vocabulary)}
        self.ids_T = np.array([places[piece] for piece in self.pieces], np.int64)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self._vocabulary[each] for each in ids)

    def cuts(self, limit: int, *, markdown: bool, fields: Collection[str] = ()) -> list[Cut]:
        return list(Cutter(self.decode_bytes, limit).cuts(self.ids_T, markdown=markdown, fields=fields))

    def texts(self, limit: int, *, markdown: bool = True, fields: Collection[str] = ()) -> list[str]:
        bounds, content = np.cumsum([0, *map(len, self.pieces)]), b"".join(self.pieces)
        begins = [int(bounds[cut.row]) + cut.skip for cut in self.cuts(limit, markdown=markdown, fields=fields)]
        return [content[begin:end].decode() for begin, end in zip(begins, [*begins[1:], len(content)], strict=True)]


def tokens_of(text: str, lengths: tuple[int, ...] = (4,), seed: int = 0) -> Tokens:
    return Tokens(text, [*lengths], random.Random(seed))


def stripped(text: str, limit: int = 20, *, markdown: bool = True) -> list[str]:
    return [each.strip() for each in tokens_of(text).texts(limit, markdown=markdown)]


@pytest.mark.parametrize("seed", range(300))
def test_passages_begin_where_the_plain_rules_say_in_windows_of_any_size(seed, monkeypatch):
    rng = random.Random(seed)
    text = "".join(rng.choice(FRAGMENTS) for _ in range(rng.choice([1, 5, 20, 80, 500])))
    tokens, limit, markdown = Tokens(text, [1, 1, 2, 3, 5, 8], rng), rng.choice([40, 64, 100]), rng.random() < 0.7
    cuts = tokens.cuts(limit, markdown=markdown)
    bounds = np.cumsum([0, *map(len, tokens.pieces)]).tolist()
    found = [(bounds[cut.row] + cut.skip, cut.headings) for cut in cuts]
    assert found == cuts_by_lines(tokens.pieces, limit, markdown=markdown)
    before = [b"".join(tokens.pieces)[:begin] for begin, _ in found]
    assert [cut[3:] for cut in cuts] == [(text.count(b"\n"), text.count(b"\f")) for text in before]
    monkeypatch.setattr(text_cuts, "WINDOW_TOKENS", 1)
    monkeypatch.setattr(text_cuts, "HEADING_TOKENS", 64)
    assert tokens.cuts(limit, markdown=markdown) == cuts


@pytest.mark.parametrize("lengths", [(1,), (1, 2, 3, 5, 8), (64,)])
def test_passages_hold_the_whole_text_in_whole_characters_and_few_tokens(lengths):
    text = "".join(random.Random(3).choices(FRAGMENTS, k=3000)) + "東" * 5000 + "x" * 20_000
    tokens = tokens_of(text, lengths)
    assert "".join(tokens.texts(60)) == text
    rows = [cut.row for cut in tokens.cuts(60, markdown=True)]
    assert rows[0] == 0
    sizes = np.diff([*rows, len(tokens.pieces)])
    assert sizes.max() <= 61  # with the token that two passages share
    assert sizes.min() >= 0
    assert tokens_of("").cuts(60, markdown=True) == []


FRONT = "---\ntitle: Wörter\ntags:\n  - one\n---\n\n"


@pytest.mark.parametrize("seed", range(60))
def test_front_matter_is_in_no_passage_and_the_rest_is_cut_as_if_it_were_not_there(seed, monkeypatch):
    rng = random.Random(seed)
    body = "".join(rng.choice(FRAGMENTS) for _ in range(rng.choice([3, 20, 80]))).strip() + "."
    front = rng.choice(["", " ", "\ufeff"]) + FRONT
    bytewise, alone = tokens_of(front + body, (1,)), tokens_of(body, (1,))
    skipped, lines = len(front.encode()), front.count("\n")
    expected = [
        cut._replace(row=cut.row + skipped, line_ends=cut.line_ends + lines) for cut in alone.cuts(40, markdown=True)
    ]
    monkeypatch.setattr(text_cuts, "WINDOW_TOKENS", rng.choice([1, 1 << 16]))
    assert bytewise.cuts(40, markdown=True, fields={"title", "tags"}) == expected
    for lengths in ((2, 3, 5), (64,)):  # one token holds the end of one and the begin of the other
        assert "".join(tokens_of(front + body, lengths).texts(60, fields={"title", "tags"})) == body


@pytest.mark.parametrize(
    "text",
    [
        "---\nauthor: Ann\n---\n\nThe text.",  # nobody has read it
        "---\ntitle: x\nsummary: |\n  Nobody has read this.\n---\n\nThe text.",
        "---\nA text\n---\ntitle: between two rules.",
        "---\ntitle: no end\n\nThe text.",
        "----\ntitle: another rule\n----\n\nThe text.",
        "---\ntitle: all that there is\n---\n \n",
        "text\n---\ntitle: not at the begin\n---\ntext",
        "---\n" + "title: x\n" * 9000 + "---\ntext",
    ],
)
def test_other_text_between_rules_stays_in_passages(text):
    tokens = tokens_of(text)
    assert "".join(tokens.texts(60, fields={"title"})) == text
    assert tokens.cuts(60, markdown=True, fields={"title"}) == tokens.cuts(60, markdown=True)


def test_a_page_behind_front_matter_begins_with_its_text():
    """A form feed there makes no passage without text."""
    tokens = tokens_of("---\ntitle: x\nempty:\n---\n\r\n\f\n# Kiwi\ntext", (1,))
    assert tokens.texts(60, fields={"title"}) == ["# Kiwi\ntext"]
    (cut,) = tokens.cuts(60, markdown=True, fields={"title"})
    assert (cut.line_ends, cut.page_ends) == (6, 1)


def test_headings_lead_passages_and_stand_above_those_that_follow():
    text = "Intro.\n\n# A\n\n## B\n\n" + "One more sentence. " * 8 + "\n\n## C\nLast.\n\n# D\n\nEnd."
    tokens = tokens_of(text)
    headings = [cut.headings for cut in tokens.cuts(20, markdown=True)]
    texts = stripped(text)
    assert texts[0] == "Intro."
    assert texts[1].startswith("# A\n\n## B\n\nOne")  # a heading without text goes with what follows
    assert texts[-2:] == ["## C\nLast.", "# D\n\nEnd."]
    assert headings == [(), *[("A", "B")] * (len(texts) - 3), ("A", "C"), ("D",)]
    assert all(each.endswith("sentence.") for each in texts[1:-2])


def test_signs_of_markdown_are_headings_in_markdown_alone_and_underlined_titles_in_every_text():
    text = "# One\n\ntext\n\nTwo\n===\n\ntext\n\nThree\n-----\n\ntext\n"
    assert [cut.headings for cut in tokens_of(text).cuts(20, markdown=True)][1:] == [("Two",), ("Two", "Three")]
    assert tokens_of(text).cuts(20, markdown=True)[0].headings == ("One",)
    assert tokens_of(f" {text}").cuts(20, markdown=True)[0].headings == ("One",)  # as SentencePiece begins a text
    assert tokens_of(" Two\n===\n").cuts(20, markdown=False)[0].headings == ("Two",)
    assert [cut.headings for cut in tokens_of(text).cuts(20, markdown=False)] == [(), ("Two",), ("Two", "Three")]
    for other in ("a paragraph\nTwo\n===\n", "Two words\n===\n", "    Two\n===\n", "===\n===\n"):
        assert {cut.headings for cut in tokens_of(other).cuts(20, markdown=True)} == {()}
    names = [("a.md", {}), ("A.MARKDOWN", {}), ("a.html", {"format": "html"}), ("a.py", {}), ("a", {"format": ["x"]})]
    assert [is_markdown(*each) for each in names] == [True, True, True, False, False]


def test_paragraphs_are_joined_while_they_fit_and_begin_passages():
    paragraphs = ["Here is a short paragraph.", "Here is another one.", "Here is a third of this kind.", "A fourth."]
    assert stripped("\n\n".join(paragraphs)) == ["\n\n".join(paragraphs[:2]), "\n\n".join(paragraphs[2:])]
    items = [f"- the item {number} of a list" for number in range(6)]
    assert stripped("\n".join(items)) == ["\n".join(items[:2]), "\n".join(items[2:4]), "\n".join(items[4:])]


def test_code_and_tables_hold_together_where_they_fit_and_are_cut_at_lines():
    code = "```\ncall(a. B)\n\n# no heading\n\nend\n```"
    assert stripped(f"{'A sentence of text. ' * 3}\n\n{code}\n\nAfter the code comes this.")[1] == code
    rows = [f"| cell {number}. Other | cell |" for number in range(9)]
    for passage in stripped("\n".join(rows)):
        assert set(passage.split("\n")) <= set(rows)


def test_little_is_not_left_alone():
    assert stripped("For example:\n\n" + "w" * 60) == ["For example:\n\n" + "w" * 60]
    assert stripped("w" * 60 + "\n\nThe end.\n\n# A\n\nb")[0] == "w" * 60 + "\n\nThe end."


def test_sentences_are_whole_where_the_limit_allows():
    sentences = ["Version 2.5 is out, e.g. here.", "Is it so?", '"Yes!" he said (twice).', "東京は大きい。", "京都も。"]
    passages = stripped(" ".join(sentences * 6), 24, markdown=False)
    assert len(passages) > 4
    for passage in passages:
        assert any(passage.startswith(each) for each in (*sentences, "he said"))
        assert any(passage.endswith(each) for each in (*sentences, '"Yes!"'))


@pytest.mark.parametrize("piece", ["x", " ", "\n", "\f", "# a\n", "```", "\f```x", "=\n", "- ", "a. ", "|", "\u0301"])
def test_a_text_of_one_sign_has_no_passages_of_a_few_tokens(piece):
    tokens = tokens_of(piece * (20_000 // len(piece)), (1,))
    assert len(tokens.cuts(100, markdown=True)) <= len(tokens.pieces) // 38


def test_no_sentence_ends_before_a_small_letter():
    text = "The first of two sentences is cut near its end, i.e.  where it has no point. The second one follows it."
    assert stripped(text, 25) == [text[: text.index("The second")].strip(), text[text.index("The second") :]]


def test_a_page_ends_a_passage_unless_a_sentence_goes_on():
    text = "On one.\fOn two.\n\n\f\nOn three, which\féndet hier.\f# Four\f# Five\n\nOn five."
    assert stripped(text) == ["On one.", "On two.", "On three, which\féndet hier.", "# Four\f# Five\n\nOn five."]
