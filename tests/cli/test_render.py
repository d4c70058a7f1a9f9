"""What a terminal shows of a generation: shades or marks, sources that fit its width; and a pipe the text alone."""

import colorsys
import io
import math
import re

import pytest
from rich.color import Color
from rich.console import Console
from rich.style import Style

from memlm.api.generation import DraftUsage, Neighbor, Token, Usage
from memlm.api.passages import AnswerPrompt, Passage, Sentence
from memlm.base.figures import duration, figure, file_size
from memlm.cli.store.render import print_passages
from memlm.cli.terminal import render
from memlm.cli.terminal.console import cell, print_table, table

PAPER = "a folder with a long name/and a document with a longer one.md"


def neighbor(document_id: str, token_id: int, weight: float) -> Neighbor:
    return Neighbor("store", document_id, "", 0, 0, 45, token_id, "x", 1.0, weight, "the words\naround it " * 5)


def token(text: str, share: float, document_id: str = "") -> Token:
    """A token with a share of p_kNN, all of it from one document."""
    knn_logprob = math.log(share) if share else -math.inf
    neighbors = (neighbor(document_id, 7, 0.9), neighbor("other.md", 8, 0.1)) if document_id else ()
    return Token(7, text, text.encode(), 0.0, 0.0, knn_logprob, lam=1.0, neighbors=neighbors)


TEXT = [token("one", 0.0), token(" two", 0.95, PAPER), token("\n", 0.6, "b.md"), token("x\x1b[2J\n\n", 0.02, "b.md")]


def printed(*, width: int = 80, colored: bool = True, **terminal) -> str:
    console = Console(file=io.StringIO(), width=width, soft_wrap=True, highlight=False, **terminal)
    render.stream(TEXT, colored=colored, to=console)
    return console.file.getvalue()


@pytest.mark.parametrize("styles", [render.ON_DARK, render.ON_LIGHT])
def test_shades_are_of_one_hue_and_monotone_in_lightness(styles):
    colors = [Style.parse(style).bgcolor for style in styles[1:]]
    triples = [color.get_truecolor() for color in colors if isinstance(color, Color)]
    hls = [colorsys.rgb_to_hls(*(part / 255 for part in triple)) for triple in triples]
    assert len({round(hue, 2) for hue, _, _ in hls}) == 1
    lightnesses = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in triples]
    assert lightnesses == sorted(lightnesses, reverse=styles is render.ON_LIGHT)
    assert len(set(lightnesses)) == len(styles) - 1


def test_a_terminal_that_says_it_is_light_gets_shades_that_grow_darker(monkeypatch):
    monkeypatch.setenv("COLORFGBG", "0;15")
    light = render.shade_of(0.95)
    monkeypatch.setenv("COLORFGBG", "15;0")
    assert (light, render.shade_of(0.95)) == (render.ON_LIGHT[-1], render.ON_DARK[-1])


def test_neighbors_whose_weights_underflow_give_nothing():
    distant = Token(7, "a", b"a", 0.0, 0.0, -math.inf, lam=1.0, neighbors=(neighbor("far.md", 7, 0.0),))
    assert not render.probability_by_document([distant])
    assert [line.plain for line in render.source_lines([distant], width=80, details=True)][-1].split()[-1] == "100%"


def test_a_pipe_gets_the_text_alone():
    assert printed() == "one two\nx\\x1b[2J\n\n\n"


def test_a_terminal_shades_memory_and_shows_its_line_ends():
    shown = printed(force_terminal=True, color_system="256")
    assert "\x1b[30;48;5;51m two" in shown
    assert "↵" in shown
    assert "\x1b[2J" not in printed(colored=False, force_terminal=True, color_system="256")
    assert "48;5" not in printed(colored=False, force_terminal=True, color_system="256")


def test_without_color_memory_is_underlined_and_lines_tell_their_share():
    shown = printed(force_terminal=True, color_system="256", no_color=True)
    assert "48;5" not in shown
    assert "\x1b[4m two" in shown
    assert "[52%]" in shown  # of 0, 0.95 and 0.6


@pytest.mark.parametrize("width", range(50, 201, 25))
@pytest.mark.parametrize("details", [True, False])
def test_sources_fit_the_terminal_and_add_up(width, details):
    lines = list(render.source_lines(TEXT, width=width, details=details))
    assert all(line.cell_len <= width for line in lines)
    rows = [line.plain for line in lines if re.search(r"\d%$", line.plain)]
    assert [int(row.rpartition(" ")[2].rstrip("%")) for row in rows] == [24, 16, 61]
    assert "the model" in rows[-1]
    assert (len(lines) > len(rows)) == details
    assert "one.md" in rows[0]  # of a long name, its end


def test_names_are_on_one_line_and_cut_at_their_beginning():
    assert render._fitted("a\nb\x1b", 20) == "a\\nb\\x1b".ljust(20)
    assert render._fitted("猫" * 12, 10) == "…" + "猫" * 4 + " "


def test_a_summary_counts_speed_and_memory():
    usage = Usage(generated_tokens=5, decode_ms=200.0)
    assert render.summary(TEXT, usage) == "4 tokens · 20.0 tokens/s · 39% from memory"
    assert render.summary([Token(1, "a", b"a", 0.0, 0.0)], None) == "1 token"


def test_a_summary_tells_what_came_of_drafts():
    drafts = (DraftUsage("text", 50, 40), DraftUsage("neighbors", 10, 1))
    usage = Usage(generated_tokens=69, steps=30, drafts=drafts)
    assert "2.3 tokens a step (41 of 60 drafted)" in render.summary(TEXT, usage)
    assert "drafted" not in render.summary(TEXT, Usage(generated_tokens=69, steps=69))


def test_an_interrupt_leaves_what_was_printed():
    def interrupted():
        yield from TEXT[:2]
        raise KeyboardInterrupt

    seen: list[Token] = []
    with pytest.raises(KeyboardInterrupt):
        render.stream(interrupted(), colored=False, to=Console(file=io.StringIO()), into=seen)
    assert seen == TEXT[:2]


@pytest.mark.parametrize("width", range(50, 201, 25))
def test_a_table_is_whole_in_every_terminal(width):
    console = Console(file=io.StringIO(), force_terminal=True, no_color=True, width=width, soft_wrap=True)
    shown = table("name", "entries", "documents", "index", "k", "lam", "temperature", title="stores")
    shown.add_row(cell("a store of documents"), "62,380", "37", "IVF1024,SQfp16", "64", "0.250", "7.221")
    print_table(shown, console)
    printed = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    assert all(part in printed for part in ("a store of documents", "temperature", "IVF1024,SQfp16", "7.221"))
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= width


def test_a_passage_is_printed_with_its_lines_and_its_own_line_ends(capsys):
    print_passages([Passage("s", "a\nb.md", "", 0, 9, "one\ntwo\x1b[2J", 1.5, first_line=3, last_line=4)], json=False)
    assert capsys.readouterr().out == "[1] a\\nb.md:3-4  score 1.5\n  one\n  two\\x1b[2J\n"


def test_a_path_in_a_narrow_table_is_whole():
    console = Console(file=io.StringIO(), force_terminal=True, no_color=True, width=50, soft_wrap=True)
    shown = table("name", "file")
    shown.add_row("smollm2", path := "/home/somebody/" + "a folder/" * 9 + "model.gguf")
    print_table(shown, console)
    assert path in console.file.getvalue()


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (figure(9.337e7), "93,370,000"),
        (figure(3.14159), "3.142"),
        (figure(0.0001234), "0.0001234"),
        (figure(-2.5), "-2.5"),
        (figure(math.nan), "nan"),
        (file_size(610), "610 bytes"),
        (file_size(7_956_571_592), "7.96 GB"),
        (duration(0.2), "1 s"),
        (duration(1.008e5), "28 h"),
        (duration(4000), "67 min"),
        (duration(89), "89 s"),
        (duration(100), "1.7 min"),
        (duration(5400), "1.5 h"),
        (duration(9e5), "10 days"),
        (duration(9e7), "1,042 days"),
    ],
)
def test_figures_are_written_as_people_read_them(shown, expected):
    assert shown == expected


def test_a_mixture_begins_with_the_sentence_of_its_largest_share_unless_the_model_answers_alone(capsys):
    passages = [Passage("s", name, "", 0, 9, "text", 1.0, sentence=Sentence(name)) for name in ("one", "two")]
    prompt = AnswerPrompt("", 9, tuple(passages), (1, 2))
    for shares, shown in (((), "“one”"), ((0.3, 0.4), "“two”"), ((0.3, 0.2), "")):
        render.print_sentence(prompt, shares)
        assert capsys.readouterr().out.partition("\n")[0] == shown


def test_passages_stand_in_the_order_of_their_shares_and_the_model_last(capsys):
    passages = tuple(Passage("s", name, "", 0, 9, "text", 1.0) for name in ("one", "two"))
    prompt = AnswerPrompt("", 9, passages, (1, 2))
    render.print_places(prompt, cited=passages[:1], shares=(0.25, 0.75 + 1e-12))
    assert capsys.readouterr().out.splitlines() == [
        "[2]  75%  two",
        "[1]  25%  one  named",
        "      0%  the model alone",
    ]
    render.print_places(prompt)
    assert capsys.readouterr().out.splitlines() == ["[1] one", "[2] two"]
