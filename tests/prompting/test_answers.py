"""Answers come from the passages that their prompts have room for, in a conversation or after a plain text."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from prompt_mixture import mixed
from running import alike

from memlm.api.answers import AnswerRequest, passage_settings
from memlm.api.chat import Message
from memlm.api.passages import Passage, Sentence
from memlm.data.corpus import Document
from memlm.errors import InvalidInput, NotFound
from memlm.generation.answer_settings import AnswerSettings
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel, load
from memlm.retrieval.sentences import pointed_out

QUESTION = "Which port?"
CLOSE = 1e-6  # between two shares
TEXTS = ["port one", "a", "port two"]
PASSAGES = [*pointed_out(QUESTION, [Passage("s", f"doc-{n}", "", 0, 9, text, 1.0) for n, text in enumerate(TEXTS)])]


@pytest.fixture(params=["chat", "plain"])
def asked(request, model_folder, tmp_path):
    """A model with a chat template and one without, neither with a datastore, with room for prompts."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    if request.param == "plain":
        (folder / "tokenizer_config.json").unlink()
    with load(folder, attention_window=44) as lm:
        yield lm, request.param


def num_tokens(lm: LanguageModel, kind: str, text: str) -> int:
    if kind == "plain":
        return len(lm.tokenizer.prompt(text))
    return len(read_of(lm, kind, text))


def continued(lm: LanguageModel, kind: str, text: str, **options) -> str:
    return (lm.chat if kind == "chat" else lm.generate)(text, **options).result().text


def test_the_answer_is_that_to_a_prompt_with_the_passages(asked):
    lm, kind = asked
    answer = lm.answer(QUESTION, PASSAGES, seed=1, max_tokens=9)
    task, *pieces, question = answer.prompt.split("\n\n")
    assert task == "Answer the question from these passages."
    assert pieces == ["[3] doc-2\nport two", "[2] doc-1\na", "[1] doc-0\nport one"]
    assert question == bare_prompt(kind)
    assert str(answer) == answer.text == continued(lm, kind, answer.prompt, seed=1, max_tokens=9)
    assert (answer.passages, answer.left_out, answer.passage_shares) == (tuple(PASSAGES), (), ())
    assert answer.num_prompt_tokens == num_tokens(lm, kind, answer.prompt)


def test_passages_without_room_are_left_out_and_named(asked):
    lm, kind = asked
    whole = lm.answer(QUESTION, PASSAGES, seed=1, max_tokens=2).num_prompt_tokens
    answer = lm.answer(QUESTION, PASSAGES, seed=1, max_tokens=2, budget=whole - 1)
    assert (answer.passages, answer.left_out) == (tuple(PASSAGES[:2]), (PASSAGES[2],))
    assert num_tokens(lm, kind, answer.prompt) == answer.num_prompt_tokens <= whole - 1
    none = lm.answer(QUESTION, PASSAGES, seed=1, max_tokens=2, budget=num_tokens(lm, kind, bare_prompt(kind)))
    assert (none.prompt, none.passages, none.left_out) == (bare_prompt(kind), (), tuple(PASSAGES))
    long = replace(PASSAGES[0], text="memory " * 600)
    none = lm.answer(QUESTION, [long], seed=1, max_tokens=2, budget=whole)  # with room for the task
    assert (none.prompt, none.num_prompt_tokens) == (bare_prompt(kind), num_tokens(lm, kind, none.prompt))
    assert (none.passages, none.left_out) == ((), (long,))
    with pytest.raises(InvalidInput, match="a budget of 3"):
        lm.answer(QUESTION, PASSAGES, budget=3)


@pytest.mark.parametrize(("max_tokens", "least"), [(10, 10), (17, 17), (None, 12)])
@pytest.mark.parametrize("mixture", [False, True])
def test_the_default_budget_leaves_room_for_the_answer(model_folder, max_tokens, least, mixture):
    """The context is 48 tokens."""
    passages = [replace(PASSAGES[0], document_id=str(n), text="a " * n, sentence=None) for n in range(1, 30)]
    with load(model_folder) as lm:
        answer = lm.answer("?", passages, seed=2, max_tokens=max_tokens, mixture=mixture)
        assert answer.num_prompt_tokens <= 48 - least
        longer = lm.answer("?", passages, seed=2, max_tokens=1, mixture=mixture)
        assert len(longer.passages) > len(answer.passages)


def test_without_passages_the_question_stands_alone(asked):
    lm, kind = asked
    answer = lm.answer(QUESTION, [], seed=1, max_tokens=2)
    assert (answer.prompt, answer.passages, answer.left_out) == (bare_prompt(kind), (), ())


def bare_prompt(kind: str) -> str:
    return {"chat": QUESTION, "plain": "Question: Which port?\nAnswer:"}[kind]


def test_a_mixture_tells_the_shares_of_the_prompts_of_the_passages_and_of_none(asked):
    lm, kind = asked
    answer = lm.answer(QUESTION, PASSAGES, mixture=True, seed=1, max_tokens=6)
    texts = [lm.answer(QUESTION, [each], seed=1, max_tokens=1).prompt for each in PASSAGES]
    texts = [text.replace("[1]", f"[{n}]") for n, text in enumerate(texts, 1)]
    texts.append(lm.answer(QUESTION, [], seed=1, max_tokens=1).prompt)
    assert answer.prompt == texts[0]
    prompts = [read_of(lm, kind, text) for text in texts]
    tokens = answer.completion.tokens
    expected_T, shares_TB = mixed(lm, prompts, [token.id for token in tokens])
    assert [token.logprob for token in tokens] == pytest.approx(expected_T, abs=1e-4)
    assert len(tokens) == 6
    assert np.array([token.passage_shares for token in tokens]) == pytest.approx(shares_TB[:, :-1], abs=CLOSE)
    assert answer.passage_shares == pytest.approx(shares_TB[:, :-1].mean(axis=0), abs=CLOSE)


def read_of(lm: LanguageModel, kind: str, text: str) -> list[int]:
    """The tokens that a request for a prompt reads."""
    if kind == "plain":
        return lm.tokenizer.prompt(text)
    return lm.checkpoint.chat_template.encode([Message("user", text)], lm.tokenizer)


def test_a_mixture_leaves_out_what_fits_no_prompt_and_refuses_options_of_retrieval(asked, monkeypatch):
    lm, _ = asked
    monkeypatch.setattr("memlm.api.answers.cited", lambda text, count: tuple(range(1, count + 1)))
    long = replace(PASSAGES[1], text="memory " * 600)
    answer = lm.answer(QUESTION, [long, PASSAGES[0]], mixture=True, seed=1, max_tokens=2, budget=150)
    assert (answer.passages, answer.left_out, len(answer.passage_shares)) == ((PASSAGES[0],), (long,), 1)
    assert answer.cited == (PASSAGES[0],)
    for options in ({"lam": 0.5}, {"session": "x"}, {"early_exit": True}, {"neighbors": 2}):
        with pytest.raises(InvalidInput, match="does not go with a mixture"):
            lm.answer(QUESTION, PASSAGES, mixture=True, **options)


def test_cited_passages_are_those_of_the_prompt(asked, monkeypatch):
    lm, _ = asked
    monkeypatch.setattr("memlm.api.answers.cited", lambda text, count: tuple(range(count, 0, -1)))
    whole = lm.answer(QUESTION, PASSAGES, seed=1, max_tokens=2)
    assert whole.cited == tuple(reversed(PASSAGES))
    less = lm.answer(QUESTION, PASSAGES, seed=1, max_tokens=2, budget=whole.num_prompt_tokens - 1)
    assert less.cited == (PASSAGES[1], PASSAGES[0])


@pytest.mark.parametrize("mixture", [False, True])
def test_passages_come_from_the_datastore_without_excluded_documents(model_folder, tmp_path, mixture):
    texts = [Document("ports", "a port"), Document("pages", "a page")]
    build_index(model_folder, texts, tmp_path / "store", check="none")
    with load(model_folder, [tmp_path / "store"], attention_window=44) as lm:
        options = {"seed": 1, "max_tokens": 2, "mixture": mixture, "num_passages": 2}
        answer = lm.answer("Which is a port?", store="store", **options)
        assert {each.document_id for each in answer.passages} == {"ports", "pages"}
        assert answer.completion.accepted.store is None
        answer = lm.answer("Which is a port?", exclude_documents=["pages"], **options)
        assert {each.document_id for each in answer.passages} == {"ports"}
        with pytest.raises(NotFound, match="no document 'nothing'"):
            lm.answer("Which is a port?", exclude_documents="nothing", **options)


@pytest.fixture
def documents(model_folder, tmp_path):
    """A model with a chat template and any room, and a datastore of three documents."""
    texts = [Document("ports", "a port\nof the page"), Document("pages", "a page"), Document("notes", "the memory")]
    build_index(model_folder, texts, tmp_path / "store", check="none")
    with load(model_folder, [tmp_path / "store"], attention_window=44) as lm:
        yield lm


def test_behind_passages_the_model_answers_alone_unless_a_parameter_says_how_to_mix(documents):
    options = {"seed": 1, "max_tokens": 4}
    for ask in (documents.answer, lambda *given, **more: documents.chat(*given, **more).result()):
        alone, mixed = (ask("Which port?", **options, **more) for more in ({}, {"lam": 0.5}))
        accepted = [getattr(each, "completion", each).accepted for each in (alone, mixed)]
        assert [each.store for each in accepted] == [None, "store"]
        assert [each.prompt.passages[0].document_id for each in accepted] == ["ports", "ports"]


@pytest.mark.parametrize(
    ("parameters", "mixture", "found"),
    [(999_999_999, False, 1), (1_000_000_000, False, 4), (1_000_000, True, 4)],
)
def test_one_passage_is_found_for_a_small_model(parameters, mixture, found):
    default = AnswerSettings.of_size(parameters).num_passages
    assert AnswerRequest("why?", mixture=mixture).search(default).k == found
    assert AnswerRequest("why?", mixture=mixture, num_passages=7).search(default).k == 7


def test_a_chat_asks_as_an_answer_does_behind_the_earlier_turns(documents):
    options = {"seed": 1, "max_tokens": 4}
    answer = documents.answer("Which port?", **options)
    chat = documents.chat("Which port?", **options).result()
    assert (chat.text, chat.accepted.prompt) == (answer.text, answer.completion.accepted.prompt)
    assert [(each.document_id, each.first_line, each.last_line) for each in answer.passages] == [("ports", 1, 2)]
    turns = [
        Message("system", "be kind"),
        Message("user", "a page?"),
        Message("assistant", "a"),
        Message("user", "Which port?"),
    ]
    chat = documents.chat(turns, **options).result()
    plain = documents.chat([*turns[:-1], Message("user", answer.prompt)], num_passages=0, use_store=False, **options)
    assert alike(chat.tokens, plain.result().tokens)  # which is read from its last token on
    assert chat.accepted.prompt.text == answer.prompt
    assert chat.accepted.prompt.num_tokens == chat.finished.usage.prompt_tokens


def test_a_turn_of_a_session_asks_the_documents_too(documents):
    options = {"temperature": 0, "max_tokens": 4}
    with documents.session() as session:
        prompts = [session.chat(text, **options).result().accepted.prompt for text in ("Which port?", "Which memory?")]
        assert [each.passages[0].document_id for each in prompts] == ["ports", "notes"]
        assert session.chat("What else?", num_passages=0, **options).result().accepted.prompt is None


def test_documents_that_are_left_out_or_deleted_are_no_passages_of_a_chat(documents):
    options = {"seed": 1, "max_tokens": 2}
    chat = documents.chat("Which port?", exclude_documents="ports", **options).result()
    assert "ports" not in {each.document_id for each in getattr(chat.accepted.prompt, "passages", ())}
    with pytest.raises(NotFound, match="no document 'nothing'"):
        documents.chat("Which port?", exclude_documents="nothing", **options)
    documents.delete_documents(["ports"])
    chat = documents.chat("Which port?", **options).result()
    assert "ports" not in {each.document_id for each in getattr(chat.accepted.prompt, "passages", ())}


def test_a_chat_without_a_question_room_or_a_word_that_is_known_has_no_passages(documents, model_folder):
    options = {"seed": 1, "max_tokens": 2}
    for messages in (" ", "zzz", [Message("assistant", "a port")]):
        assert documents.chat(messages, **options).result().accepted.prompt is None
    assert documents.chat("a port" + " " * 70_000, **options).result().accepted.prompt.passages
    store = documents.stores[0].path
    with load(model_folder, [store]) as lm:  # a context of 48 tokens has no room for a passage and its task
        prompt = lm.chat("a port?", **options).result().accepted.prompt
        assert (prompt.text, prompt.passages, [each.document_id for each in prompt.left_out]) == (
            "a port?",
            (),
            ["ports"],
        )
    with load(model_folder) as lm:
        assert lm.chat("a port?", **options).result().accepted.prompt is None
    with pytest.raises(InvalidInput, match="num_passages is 257"):
        documents.chat("Which port?", num_passages=257)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"title": "a\0"}, "passages.title"),
        ({"document_id": "a\0"}, "passages.document_id"),
        ({"title": "a" * 262_145}, "passages"),  # stands in the prompt as the text does
    ],
)
def test_all_that_a_passage_brings_into_a_prompt_is_checked(changes, field):
    with pytest.raises(InvalidInput) as refused:
        AnswerRequest("why?", (replace(Passage("s", "d", "", 0, 1, "text", 1.0), **changes),))
    assert refused.value.field == field


def nested(levels):
    metadata = {}
    for _ in range(levels):
        metadata = {"a": metadata}
    return metadata


def test_metadata_of_passages_is_nested_no_deeper_than_that_of_documents():
    assert AnswerRequest("why?", (replace(PASSAGES[0], metadata=nested(99)),)).passages
    for levels in (100, 500, 100_000):  # by the rule, beyond pickle, beyond json
        with pytest.raises(InvalidInput, match="nested") as refused:
            AnswerRequest("why?", (replace(PASSAGES[0], metadata=nested(levels)),))
        assert refused.value.field == "passages.metadata"


def test_metadata_of_passages_is_bounded_and_has_to_be_json():
    long = replace(PASSAGES[0], metadata={"note": "a" * 262_144})
    with pytest.raises(InvalidInput, match="with their metadata; at most 262,144"):
        AnswerRequest("why?", (long,))
    for wrong in ({"a": object()}, {"a": {1, 2}}, ["pair"], {"a": float("nan")}, {"a": "\ud800"}):
        with pytest.raises(InvalidInput, match="cannot be sent as JSON") as refused:
            AnswerRequest("why?", (replace(PASSAGES[0], metadata=wrong),))
        assert refused.value.field == "passages.metadata"


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("a", "b", "a"), "expected each datastore once"),
        (("a", ""), "none empty"),
        ("ab", "names in a tuple"),
        (tuple(map(str, range(17))), "at most 16 names"),
    ],
)
def test_wrong_names_of_datastores_are_refused(names, says):
    with pytest.raises(InvalidInput, match=says) as refused:
        AnswerRequest("why?", passage_stores=names)
    assert refused.value.field == "passage_stores"


@pytest.mark.parametrize(
    ("passages", "settings", "options", "named"),
    [
        (None, {"budget": 5}, {}, "budget"),
        (None, {"mixture": True}, {}, "mixture"),
        (None, {"passage_stores": ("a",)}, {}, "passage_stores"),
        (None, {}, {"lam": 0.5}, "lam"),
        ([], {}, {}, "passages"),
    ],
)
def test_a_request_goes_with_nothing_else(passages, settings, options, named):
    request, plain = AnswerRequest("why?"), passage_settings(None, "auto", (), None, mixture=False)
    assert AnswerRequest.of(request, None, plain, {}) is request
    with pytest.raises(InvalidInput, match=f"takes no options; put {named} into it"):
        AnswerRequest.of(request, passages, {**plain, **settings}, options)


def test_a_budget_is_bounded_and_a_long_answer_is_refused_by_its_own_name(model_folder):
    for budget in (0, (1 << 20) + 1):
        with pytest.raises(InvalidInput, match=f"budget is {budget}; expected between 1 and 1048576"):
            AnswerRequest("why?", budget=budget)
    with load(model_folder) as lm:  # of 48 tokens
        with pytest.raises(InvalidInput, match="max_tokens is 48, and the context has 48 tokens") as refused:
            lm.answer("?", [], max_tokens=48)
        assert refused.value.field == "max_tokens"


def test_excluded_documents_have_to_be_known_where_they_hold(model_folder, tmp_path):
    for name in ("ports", "pages"):
        build_index(model_folder, [Document(name, f"a {name}")], tmp_path / name, check="none")
    with load(model_folder, [tmp_path / "ports", tmp_path / "pages"], attention_window=44) as lm:
        options = {"seed": 1, "max_tokens": 2, "lam": 0.5}
        assert lm.answer("Which is a port?", exclude_documents="pages", **options).passages
        lists = {"passage_stores": "ports", "store": "pages"}
        with pytest.raises(
            NotFound, match=r"'pages' to exclude in the datastore 'ports'.*passages are looked for there"
        ):
            lm.answer("Which is a port?", exclude_documents="pages", **lists, **options)
        with pytest.raises(NotFound, match=r"'ports' to exclude in the datastore 'pages'.*taken from there.*two lists"):
            lm.answer("Which is a port?", exclude_documents="ports", **lists, **options)
        with pytest.raises(NotFound) as plain:
            lm.answer("Which is a port?", exclude_documents="pages", store="ports", **options)
        assert "two lists" not in str(plain.value)
        del options["lam"]
        alone = lm.answer("Which is a port?", exclude_documents="ports", use_store=False, num_passages=4, **options)
        assert {each.document_id for each in alone.passages} == {"pages"}
        for one_list in ({}, {"use_store": False}, {"mixture": True}):  # no probabilities come from datastores
            with pytest.raises(NotFound) as plain:
                lm.answer("Which is a port?", exclude_documents="pages", **lists, **one_list, **options)
            assert "two lists" not in str(plain.value)


def test_no_passages_and_a_number_of_them_are_refused():
    with pytest.raises(InvalidInput, match="leave out one"):
        AnswerRequest.of("why?", [], {"num_passages": 5}, {})


def test_a_passage_that_is_alone_points_at_its_sentence(asked):
    lm, kind = asked
    text = "The gate has a lock. Its port is 8443. It is red."
    passage = Passage("s", "gate.md", "Gate", 0, 9, text, 1.0, headings=("Gate", "Network"))
    answer = lm.answer(QUESTION, [passage], seed=1, max_tokens=2)
    task, *pieces, question = answer.prompt.split("\n\n")
    assert task == "Answer the question from the text."
    assert pieces == [f"Text: Gate, Network\n{text}", "Most relevant sentence: Its port is 8443."]
    assert question == {"chat": f"Question: {QUESTION}", "plain": bare_prompt(kind)}[kind]
    assert answer.passages[0].sentence.text == "Its port is 8443."
    several = lm.answer(QUESTION, [passage, PASSAGES[0]], seed=1, max_tokens=2).prompt
    assert "[1] Gate, Network\n" in several
    assert "relevant sentence" not in several


@pytest.mark.parametrize("sentence", ["text", 5, Sentence(5), Sentence("a\0b"), Sentence("a", words=(5,))])
def test_a_sentence_that_is_none_is_refused_by_name(sentence):
    with pytest.raises(InvalidInput, match="sentence"):
        AnswerRequest(QUESTION, (replace(PASSAGES[0], sentence=sentence),))


def test_a_large_model_is_not_pointed_at_a_sentence(asked, monkeypatch):
    lm, _ = asked
    passage = replace(PASSAGES[0], text="One. Another port. Third.", sentence=None)
    monkeypatch.setattr(lm.engine, "_answers", AnswerSettings.of_size(2 * 10**9))
    assert "relevant sentence" not in lm.answer(QUESTION, [passage], seed=1, max_tokens=2).prompt


def test_a_question_that_fits_only_without_its_label_is_asked_bare(asked):
    lm, kind = asked
    budget = num_tokens(lm, kind, bare_prompt(kind))
    answer = lm.answer(QUESTION, PASSAGES[:1], seed=1, max_tokens=2, budget=budget)
    assert (answer.prompt, answer.left_out) == (bare_prompt(kind), tuple(PASSAGES[:1]))


def test_a_passage_that_fits_only_without_its_pointer_has_none(asked):
    lm, _ = asked
    passage = replace(PASSAGES[0], text="The gate has a lock. Its port is 8443.", sentence=None)
    whole = lm.answer(QUESTION, [passage], seed=1, max_tokens=2)
    less = lm.answer(QUESTION, [passage], seed=1, max_tokens=2, budget=whole.num_prompt_tokens - 1)
    assert "Most relevant sentence" in whole.prompt
    assert "Most relevant sentence" not in less.prompt
    assert [each.document_id for each in less.passages] == ["doc-0"]
