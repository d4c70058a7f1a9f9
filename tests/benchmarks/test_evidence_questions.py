"""Questions by rule about stored documents, in `benchmarks evidence`."""

from __future__ import annotations

import pytest
from texts import make_text

from benchmarks.evidence import questions as bench
from benchmarks.evidence.generation import begins_with
from benchmarks.evidence.questions import Question, by_document, prompt_of, questions_of, right_answers
from memlm.data.corpus import Document
from memlm.errors import InvalidInput

TEXT = (
    "It is said in the old book of the town that Maren was there. The number of the door in the hall is 4711, and the"
    " door is red. The number of the door in the hall is 4711 again. We saw in the end of it all nothing.\nHere the"
    " port of the small new server is called Porto. Short is 5.\n    And in words behind blanks Berlin stands."
)
ISABELLE = r"""
definition "plain x = x"
definition lift :: "'a \<Rightarrow> 'b"
where
  "lift f e = (case e of OK x \<Rightarrow> f x)"
definition in_arcs :: "'a set" where "in_arcs G v \<equiv> {e \<in> arcs G}"
definition isTrue where "isTrue == True"
lemma lifted: "lift f = lift g"
"""
PYTHON = """
LIMIT = 4096
limit = 5
def open_door(key, force=False): pass
class Door:
    def close(self): pass
    async def lock(self, code): pass
    def knock(self, times: int = 1, *loudly): pass
    def __init__(self, wood): pass
class Other:
    def __init__(self, iron): pass
"""
ENGLISH = "Lakes are many. The Nile is a river of Africa. It is a long one. Maren Hansen was the first woman there."


def definitions(text: str) -> list[tuple[str, str]]:
    found = questions_of([Document("d", text)], 100)
    return sorted((question.text, question.answer) for question in found if question.kind == "definition")


def test_questions_ask_for_names_and_numbers_behind_six_words():
    found = questions_of([Document("d", TEXT), Document("e", "nothing to ask.")], 10)
    assert sorted((question.kind, question.text, question.answer) for question in found) == [
        ("name", "Here the port of the small new server is called", "Porto"),
        ("name", "It is said in the old book of the town that", "Maren"),
        ("number", "The number of the door in the hall is", "4711"),
    ]
    assert {question.document_id for question in found} == {"d"}
    assert questions_of([Document("d", TEXT)], 2) == questions_of([Document("d", TEXT)], 3)[:2]
    with pytest.raises(InvalidInput, match="name or number"):
        questions_of([Document("e", "nothing to ask.")], 10)


def test_definitions_of_isabelle_python_and_english_are_asked_for():
    assert definitions(ISABELLE) == [
        (r"""definition in_arcs :: "'a set" where "in_arcs G v \<equiv>""", r"{e \<in>"),
        (ISABELLE[ISABELLE.index("definition lift") : ISABELLE.index(" (case")], "(case e"),
    ]  # and not isTrue, whose name contains the answer
    assert definitions(PYTHON) == [
        ("LIMIT =", "4096"),
        ("async def lock(self,", "code"),
        ("def knock(self,", "times"),
        ("def open_door(", "key, force"),
    ]  # and no `__init__`, which two classes define
    assert definitions(ENGLISH) == [("Maren Hansen was the", "first woman"), ("The Nile is a", "river of")]


def test_kinds_have_equal_shares_of_the_questions():
    text = "\n".join(f"{name}_SIZE = {number}9" for number, name in enumerate(("RED", "BLUE", "GREEN", "GRAY", "PINK")))
    found = questions_of([Document("d", TEXT), Document("e", text)], 5)
    kinds = [question.kind for question in found]
    assert {kind: kinds.count(kind) for kind in kinds} == {"name": 2, "number": 1, "definition": 2}
    assert len(questions_of([Document("d", TEXT), Document("e", text)], 100)) == 8


def test_an_answer_is_right_as_a_whole_word():
    answers = [" 4711, and", "4711", " 47111", "the 4711", ""]
    assert [begins_with(each, "4711") for each in answers] == [True, True, False, False, False]


def test_figures_are_summed_by_document():
    asked = [Question(name, "name", "", "") for name in ("a", "b", "a")]
    sums, counts = by_document(asked, [True, False, True])
    assert (sums.tolist(), counts.tolist()) == ([2, 0], [2, 1])


def test_batched_answers_are_those_of_one_question_at_a_time(lm, monkeypatch):
    """With the greedy text itself as some answers, and another word as the others."""
    prompts = [make_text(seed, 4 + seed) for seed in range(7)]
    texts = [lm.generate_batch([each], temperature=0, max_tokens=20, context_cache=0)[0].text for each in prompts]
    answers = [" ".join(text.split()[: 1 + seed % 3]) if seed % 2 else "nowhere" for seed, text in enumerate(texts)]
    asked = [Question("d", "name", prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    slow = [begins_with(text, answer) for text, answer in zip(texts, answers, strict=True)]
    monkeypatch.setattr(bench, "AT_ONCE", 2)
    told = []
    assert right_answers(lm, asked, prompts, {}, lambda *done: told.append(done)) == slow
    assert True in slow
    assert False in slow
    assert told == [(2, 7), (4, 7), (6, 7), (7, 7)]


def test_a_prompt_ends_with_the_best_passage_and_the_question(lm, monkeypatch):
    snapshot = lm.engine.stores.model_store().snapshot
    query = lm.detokenize(snapshot.tokens(next(iter(snapshot.documents())).id, 10, 30).tolist())
    best, _ = lm.find_passages(query, k=2)
    monkeypatch.setattr(bench, "BUDGET", 1000)
    assert prompt_of(lm, query).endswith(f"{best.text}\n\n{query}")
