"""Chains give the prompts that their papers describe, and keep every step."""

from types import SimpleNamespace

import pytest

from memlm.errors import InvalidInput
from memlm.prompting.chains import choose, least_to_most, scratchpad, selection_inference


class Scripted:
    """A model that gives the next of some texts, and likes the choices in an order."""

    def __init__(self, *texts: str, likes: tuple[str, ...] = ()) -> None:
        self.texts, self.likes, self.calls = list(texts), likes, []

    def generate(self, prompt, **options):
        self.calls.append((prompt, options))
        text = self.texts.pop(0).split(options["stop"])[0]
        finished = SimpleNamespace(usage=SimpleNamespace(generated_tokens=len(text.split())))
        return SimpleNamespace(result=lambda: SimpleNamespace(text=text, finished=finished))

    def loglikelihood(self, context, continuation):
        return -1.0 - self.likes.index(continuation.strip()), False

    def tokenize(self, text):
        return [0]


def test_a_scratchpad_holds_the_work_before_the_answer():
    model = Scripted(" 2 + 9 = 11, so 1 and carry 1\nAnswer: no", " 31\nmore")
    found = scratchpad(model, "12 + 19", examples="Question: 1 + 1\nWork: 2\nAnswer: 2\n", seed=3)
    first = "Question: 1 + 1\nWork: 2\nAnswer: 2\nQuestion: 12 + 19\nWork:"
    second = f"{first} 2 + 9 = 11, so 1 and carry 1\nAnswer:"
    assert [prompt for prompt, _ in model.calls] == [first, second]
    assert [options["stop"] for _, options in model.calls] == ["\nAnswer:", "\n"]
    assert [(options["seed"], options["max_tokens"]) for _, options in model.calls] == [(3, 256), (3, 64)]
    assert str(found) == found.answer == found.steps[-1].result == "31"
    assert [(step.prompt, step.num_tokens) for step in found.steps] == [(first, 10), (second, 1)]


def test_options_of_the_caller_limit_each_step():
    model = Scripted("work", "answer")
    scratchpad(model, "q", max_tokens=5)
    assert [options["max_tokens"] for _, options in model.calls] == [5, 5]


def test_parts_are_answered_before_the_whole():
    model = Scripted(
        " How old is Ana?\n2) How old is Bo?\n3. How old are both?\n- How old is Ana?\n\nno",
        " 3",
        " Twice 3, so 6",
        " 9",
    )
    found = least_to_most(model, "How old are both?", examples="E\n")
    ana = "Question: How old is Ana?\nAnswer:"
    bo = f"{ana} 3\nQuestion: How old is Bo?\nAnswer:"
    assert [step.prompt for step in found.steps] == [
        "E\nQuestion: How old are both?\nFirst answer these questions:\n1.",
        ana,
        bo,
        f"{bo} Twice 3, so 6\nQuestion: How old are both?\nAnswer:",
    ]
    assert found.answer == "9"


def test_no_more_parts_than_asked_for_are_answered():
    model = Scripted(" a\n2. b\n3. c", "x", "y")
    assert [step.prompt for step in least_to_most(model, "q", max_parts=1).steps[1:]] == [
        "Question: a\nAnswer:",
        "Question: a\nAnswer: x\nQuestion: q\nAnswer:",
    ]
    with pytest.raises(InvalidInput, match="max_parts is -1"):
        least_to_most(model, "q", max_parts=-1)


def test_facts_are_selected_word_for_word_and_inferences_become_facts():
    facts = ["Emily is a mouse.", "Mice fear wolves.", "Sheep never bite."]
    model = Scripted(
        " Emily fears wolves.\n", " Emily fears Winona.\n", " Winona\n",
        likes=("Emily fears wolves.", "Mice fear wolves.", "Emily is a mouse.", "Sheep never bite."),
    )  # fmt: skip
    found = selection_inference(model, "Whom does Emily fear?", facts)
    results = [step.result for step in found.steps]
    assert results == [
        "Mice fear wolves.", "Emily is a mouse.", "Emily fears wolves.",
        "Emily fears wolves.", "Mice fear wolves.", "Emily fears Winona.",
        "Winona",
    ]  # fmt: skip
    asked = "Question: Whom does Emily fear?\nTo answer it, we use:"
    assert found.steps[0].prompt == "Emily is a mouse.\nMice fear wolves.\nSheep never bite.\n" + asked
    assert found.steps[1].prompt == found.steps[0].prompt + " Mice fear wolves."
    assert found.steps[2].prompt == "Mice fear wolves. Emily is a mouse. Therefore,"
    assert found.steps[3].prompt.startswith("\n".join([*facts, "Emily fears wolves.\n"]))
    assert found.steps[-1].prompt == "Emily fears Winona.\nQuestion: Whom does Emily fear?\nAnswer:"
    with pytest.raises(InvalidInput, match="facts is empty"):
        selection_inference(model, "q", [])


@pytest.mark.parametrize("text", ["", " Sheep bite.\n"])
def test_an_inference_that_is_empty_or_known_adds_no_fact(text):
    model = Scripted(text, text, " yes", likes=("Sheep bite.",))
    found = selection_inference(model, "Do they?", ["Sheep bite.", "Sheep bite."], num_selected=5)
    assert len(found.steps) == 5
    assert found.steps[2].prompt == "Sheep bite.\nQuestion: Do they?\nTo answer it, we use:"


def test_a_choice_is_the_likeliest_by_token(lm):
    choices = [" the memory of a model and the page", " a", " it is"]
    means = [lm.loglikelihood("the page", each)[0] / len(lm.tokenize(each)) for each in choices]
    sums = [lm.loglikelihood("the page", each)[0] for each in choices]
    assert choose(lm, "the page", choices) == means.index(max(means)) != sums.index(max(sums))
    with pytest.raises(InvalidInput, match="choices is empty"):
        choose(lm, "the page", [])


def test_chains_run_on_a_model(lm):
    found = selection_inference(lm, "a", ["the page", "a"], rounds=1, num_selected=1, seed=1, max_tokens=3)
    assert found.steps[0].result in ("the page", "a")
    assert found.steps[-1].num_tokens <= 3
