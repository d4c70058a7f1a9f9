"""Prompts keep their budgets, waste none of them, and say which pieces are missing."""

import random
from dataclasses import replace

import pytest

from memlm.api.passages import Passage
from memlm.errors import InvalidInput
from memlm.prompting.builder import Part, build_prompt, cited, numbered


def words(text: str) -> int:
    return len(text.split())


def test_parts_come_in_order_and_the_best_piece_last():
    parts = [Part("rules", ("be brief",)), Part("passages", ("best one", "second", "third of them"))]
    built = build_prompt(parts, "Which one?", budget=100, count_tokens=words)
    assert built.text == "be brief\n\nthird of them\n\nsecond\n\nbest one\n\nWhich one?"
    assert (built.num_tokens, built.taken) == (10, {"rules": (0,), "passages": (0, 1, 2)})
    assert built.left_out == {"rules": (), "passages": ()}


def test_a_piece_that_does_not_fit_is_left_out_and_the_next_one_tried():
    parts = [Part("passages", ("a b c", "d e f g h", "i", "j k l m"))]
    built = build_prompt(parts, "q", budget=5, count_tokens=words)
    assert (built.text, built.num_tokens) == ("i\n\na b c\n\nq", 5)
    assert (built.taken, built.left_out) == ({"passages": (0, 2)}, {"passages": (1, 3)})


def test_a_part_keeps_to_its_own_budget():
    parts = [Part("feedback", ("a b", "c d", "e"), budget=3), Part("passages", ("f g",))]
    built = build_prompt(parts, "q", budget=100, count_tokens=words)
    assert (built.taken, built.left_out["feedback"]) == ({"feedback": (0, 2), "passages": (0,)}, (1,))
    assert build_prompt([Part("none", ("a",), budget=0)], "q", budget=9, count_tokens=words).left_out == {"none": (0,)}


@pytest.mark.parametrize("seed", range(30))
def test_no_prompt_is_over_its_budget_and_no_left_out_piece_would_fit(seed):
    rng = random.Random(seed)
    pieces = [[" ".join("w" * rng.randint(1, 9)) for _ in range(rng.randint(0, 6))] for _ in range(2)]
    parts = [Part("a", tuple(pieces[0]), budget=rng.randint(0, 20)), Part("b", tuple(pieces[1]))]
    budget = rng.randint(2, 40)
    built = build_prompt(parts, "the question", budget=budget, count_tokens=words)
    assert built.num_tokens == words(built.text) <= budget
    assert built.text.endswith("the question")
    for part in parts:
        used = sum(words(part.pieces[number]) for number in built.taken[part.name])
        assert sorted((*built.taken[part.name], *built.left_out[part.name])) == list(range(len(part.pieces)))
        assert part.budget is None or used <= part.budget
        for number in built.left_out[part.name]:
            size = words(part.pieces[number])
            assert built.num_tokens + size > budget or used + size > (part.budget or 0)


def test_what_cannot_be_built_is_refused():
    with pytest.raises(InvalidInput, match="has 2 tokens, and the prompt a budget of 1"):
        build_prompt([], "the question", budget=1, count_tokens=words)
    with pytest.raises(InvalidInput, match="one name"):
        build_prompt([Part("a", ()), Part("a", ())], "q", budget=9, count_tokens=words)
    with pytest.raises(InvalidInput, match="budget is -1"):
        Part("a", (), budget=-1)


def test_passages_are_numbered_and_citations_are_found():
    passages = [Passage("s", "doc", title, 0, 3, text, 1.0) for title, text in (("", "One."), ("The\nTitle", "Two."))]
    assert numbered(passages) == ("[1] doc\nOne.", "[2] The Title\nTwo.")
    below = replace(passages[0], headings=("Guide", "doc", "Ports"), text="## Ports\n\nOne.")
    assert numbered([below]) == ("[1] doc, Guide\n## Ports\n\nOne.",)
    assert numbered([replace(below, text="One.")]) == ("[1] doc, Guide, Ports\nOne.",)
    assert cited("As [2] says [1, 2], not [3] nor [0] nor [x].", 2) == (2, 1)
    assert cited("none", 2) == ()
    assert cited("[" + "1" * 5000 + "] [1]", 2) == (1,)
