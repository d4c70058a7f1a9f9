"""A chat finds passages for its last user message, and with less weight for those before it, in a session too."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chats import CHATML, PLAIN, PLAIN_TOKENS, TOKENS, give_template, save_chat_model

from memlm.api.chat import EARLIER_CHARACTERS, ChatRequest, Message
from memlm.data.chat import ChatTemplate
from memlm.data.corpus import Document
from memlm.data.tokenizer import Tokenizer
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel, load
from memlm.prompting.asked_before import user_messages

DOCUMENTS = [
    Document("page", "This is the page. It ends at noon."), Document("sea", "This is the sea. It ends at night."),
    Document("memory", "the memory"), Document("model", "a model"),
]  # fmt: skip
OPTIONS = {"temperature": 0, "max_tokens": 3}
# Two tokens around a message, and a template that no user message can be told from others in.
BRACKETS = "{% for m in messages %}<|im_start|>{{ m.role[0] }}{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def lm(model_folder: Path, tmp_path: Path) -> Iterator[LanguageModel]:
    """With any room."""
    build_index(model_folder, DOCUMENTS, tmp_path / "store", check="none")
    with load(model_folder, [tmp_path / "store"], attention_window=44) as lm:
        yield lm


def talk(*texts: str) -> list[Message]:
    """What a user said, with an answer to each before the last."""
    return [Message(("user", "assistant")[number % 2], text) for number, text in enumerate(texts)]


def found(lm: LanguageModel, messages: list[Message], **options: object) -> list[str]:
    prompt = lm.chat(messages, **OPTIONS, **options).result().accepted.prompt
    return [each.document_id for each in prompt.passages] if prompt else []


def test_a_question_that_refers_to_another_finds_the_passage_of_that(lm: LanguageModel) -> None:
    for name, other in (("page", "sea"), ("sea", "page")):
        turns = talk(f"what is the {name}?", "a", "when does it end?")
        assert found(lm, turns) == [name]
        assert found(lm, turns, num_passages=2) == [name, other]
        with lm.session() as session:
            for text in (turns[0].content, turns[2].content):
                prompt = session.chat(text, **OPTIONS).result().accepted.prompt
                assert [each.document_id for each in prompt.passages] == [name]
        (pointed,) = prompt.passages
        assert pointed.sentence.text.startswith("It ends")  # and the sentence is that of the last one


def test_the_last_message_counts_most_and_what_others_than_the_user_say_not_at_all(lm: LanguageModel) -> None:
    assert found(lm, talk("the page?", "a", "the memory?")) == ["memory"]
    assert found(lm, talk("the page?", "the sea ends", "it ends?")) == ["page"]
    assert found(lm, [Message("system", "the sea"), *talk("the page?", "the sea", "it ends?")]) == ["page"]


def test_three_messages_before_the_last_one_count_and_the_end_of_each(lm: LanguageModel) -> None:
    assert found(lm, talk("page?", "a", "and?", "a", "or?", "a", "well?")) == ["page"]
    assert found(lm, talk("page?", "a", "why?", "a", "and?", "a", "or?", "a", "well?")) == []
    assert found(lm, talk("page? " + "x" * EARLIER_CHARACTERS, "a", "well?")) == []
    assert found(lm, talk("x" * EARLIER_CHARACTERS + " page?", "a", "well?")) == ["page"]


def test_a_session_knows_what_it_was_asked_and_no_passage(lm: LanguageModel) -> None:
    """Of what the session still has: a forgotten turn counts no more, and one with passages by its question."""
    with lm.session() as session:
        session.chat("the page?", num_passages=3, **OPTIONS).result()  # the passages have all words
        before = session.info().num_tokens
        session.chat("the sea?", num_passages=0, **OPTIONS).result()
        asked = dict(num_passages=1, **OPTIONS)
        with session.fork() as fork:
            assert fork.chat("zzz?", **asked).result().accepted.prompt.passages[0].document_id in ("page", "sea")
        session.forget(before, session.info().num_tokens)
        assert session.chat("zzz?", **asked).result().accepted.prompt.passages[0].document_id == "page"
    for number in (1, 3):  # prompts with one passage and with several differ
        with lm.session() as session:
            session.chat("which page?", num_passages=number, **OPTIONS).result()
            prompt = session.chat("zzz?", num_passages=4, **OPTIONS).result().accepted.prompt
            assert [each.document_id for each in prompt.passages] == ["page"]  # the sea ends too, as its passage says


def test_new_messages_of_a_session_count_before_those_that_it_has_read(lm: LanguageModel) -> None:
    with lm.session() as session:
        session.chat("the sea?", num_passages=0, **OPTIONS).result()
        turns = talk("page?", "a", "and?", "a", "or?", "a", "well?")
        assert session.chat(turns, **OPTIONS).result().accepted.prompt.passages[0].document_id == "page"


@pytest.mark.parametrize(("source", "tokens"), [(CHATML, TOKENS), (PLAIN, PLAIN_TOKENS), (BRACKETS, TOKENS)])
def test_the_user_messages_of_a_session_are_those_of_its_conversation(
    tmp_path: Path, tokenizer: Tokenizer, source: str, tokens: dict[str, str]
) -> None:
    folder = save_chat_model(tmp_path / "model", tokenizer)
    give_template(folder, source, tokens)
    turns = talk("the first?", "no: user: <|im_end|>", "a\n\nb \n", "the <|im_start|>", "one more?", "yes")
    with load(folder) as lm:
        template, tokenizer = lm.checkpoint.chat_template, lm.checkpoint.tokenizer
        ids = template.encode(turns[:1], tokenizer)
        for place in range(1, len(turns), 2):
            ids += [*tokenizer.encode(turns[place].content)]
            ids += template.encode(turns[place + 1 :][:1], tokenizer, continued=True) if place + 1 < len(turns) else []
        texts = [text.strip() for text in user_messages(ids, template, tokenizer)]
        assert texts == [turn.content.strip() for turn in turns[::-1] if turn.role == "user"]
        assert list(user_messages([], template, tokenizer)) == []
        assert list(user_messages(ids[:-1][:3], template, tokenizer)) == []


def test_a_template_that_marks_no_user_message_has_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = save_chat_model(tmp_path / "model", tokenizer)
    give_template(folder, BARE, TOKENS)
    with load(folder) as lm:
        template: ChatTemplate = lm.checkpoint.chat_template
        ids = template.encode(talk("a page?"), lm.checkpoint.tokenizer)
        assert list(user_messages(ids, template, lm.checkpoint.tokenizer)) == []


def test_the_messages_before_the_last_one_come_latest_first() -> None:
    turns = [*talk("one", "x", "two", "x", "three"), Message("assistant", "half")]
    assert ChatRequest(tuple(turns)).asked_before == ("two", "one")
    assert ChatRequest((Message("assistant", "a"),)).asked_before == ()
