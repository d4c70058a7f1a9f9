import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from reference import stop_plainly

from memlm.api.generation import Token
from memlm.generation.detokenizer import Detokenizer


def tokens_of(pieces: list[bytes]) -> list[Token]:
    return [Token(id=number, text="", bytes=piece, logprob=0.0, lm_logprob=0.0) for number, piece in enumerate(pieces)]


def run(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    """The text of every token let go, and the stop string reached."""
    stream, shown = Detokenizer(stop), []
    for token in tokens_of(pieces):
        shown += stream.push(token)
        if stream.stopped_by is not None:
            break
    else:
        shown += stream.finish()
    assert [token.id for token in shown] == list(range(len(shown)))
    return [token.text for token in shown], stream.stopped_by


def cut(text: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(edges)]


@given(st.text(alphabet="abé猫🙂 ", max_size=30), st.lists(st.integers(0, 200), max_size=20))
def test_text_is_whole_however_its_bytes_are_cut(text, places):
    shown, _ = run(cut(text.encode(), places))
    assert "".join(shown) == text


@given(
    st.text(alphabet="abé", max_size=30),
    st.lists(st.integers(0, 200), max_size=20),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_nothing_of_a_stop_string_is_shown_wherever_tokens_end(text, places, stops):
    shown, stopped_by = run(cut(text.encode(), places), tuple(stops))
    expected = stop_plainly(text, stops)
    if stopped_by is None:
        assert "".join(shown) == expected == text
    else:
        # Tokens come one by one: the first stop string to be complete ends the text, where it begins.
        assert "".join(shown) + stopped_by == text[: len("".join(shown)) + len(stopped_by)]
        assert not any(stop in "".join(shown) for stop in stops)


def test_bytes_that_are_no_utf8_become_replacement_characters():
    assert "".join(run([b"a", b"\xff", b"b", b"\xe7\x8c"])[0]) == "a\ufffdb\ufffd"


@given(st.text(alphabet="ab", max_size=60), st.lists(st.text(alphabet="ab", min_size=1, max_size=8), max_size=3))
def test_what_waits_is_the_longest_beginning_of_a_stop_string(text, stops):
    """Token by token, against a search through all that is known."""
    stream, shown = Detokenizer(tuple(stops)), ""
    for place, token in enumerate(tokens_of([character.encode() for character in text])):
        shown += "".join(token.text for token in stream.push(token))
        known = text[: place + 1]
        if found := [(known.find(stop), -len(stop), stop) for stop in stops if stop in known]:
            assert (shown, stream.stopped_by) == (known[: min(found)[0]], min(found)[2])
            return
        waits = (n for n in range(len(known), 0, -1) if any(stop.startswith(known[-n:]) for stop in stops))
        assert shown == known[: len(known) - next(waits, 0)]


def test_a_stop_string_that_is_almost_met_costs_no_more_than_its_text():
    """Forty thousand tokens are held back, and the next one shows that no stop string comes."""
    count = 40_000
    stream = Detokenizer(tuple("🙂" * count + str(number) for number in range(16)))
    *held, last = tokens_of(["🙂".encode()] * count + [b"d"])
    assert not any(map(stream.push, held))
    begin_s = time.process_time()
    assert len(stream.push(last)) == count + 1
    assert time.process_time() - begin_s < 0.7


def test_a_token_is_let_go_as_soon_as_it_is_certain():
    stream = Detokenizer(stop=("END",))
    tokens = tokens_of([b"a", b" E", b"N", b"x", b"END"])
    assert [[t.text for t in stream.push(token)] for token in tokens] == [["a"], [], [], [" E", "N", "x"], []]
    assert stream.stopped_by == "END"


def test_the_token_that_holds_a_stop_string_keeps_what_is_before_it():
    shown, stopped_by = run([b"one", b" two.\n\nthree", b" four"], stop=("\n\n",))
    assert shown == ["one", " two."]
    assert stopped_by == "\n\n"
