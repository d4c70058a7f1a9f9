"""Feedback on earlier answers comes into the prompt of a similar question, and of no other."""

from dataclasses import replace
from pathlib import Path

import pytest
from chats import save_chat_model
from running import RunningServer, alike

from memlm.api.chat import ChatRequest, Message
from memlm.api.datastores import text_id
from memlm.api.feedback import NOTE, feedback_request, most_similar, nearest_request, with_feedback
from memlm.api.generation import Neighbor
from memlm.client import Client
from memlm.data.corpus import Document
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput, NotFound
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import load_checkpoint

PORT, MAIL = "Which port does the gateway use?", "How do I restart the mail server?"


def place_of(question: str, feedback: str) -> Neighbor:
    metadata = {"question": question, "feedback": feedback}
    return Neighbor("notes", "feedback/1", "", 0, 0, 1, 0, "\n", 0.0, 1.0, "", metadata)


def asked(text: str, *found: Neighbor) -> str:
    return with_feedback(ChatRequest.of(text, {}), found).messages[-1].content


def test_the_most_similar_question_counts_whatever_comes_first():
    found = (place_of(MAIL, "say how"), place_of(PORT, "name the port only"))
    assert asked(PORT, *found) == f"{PORT}\n\n{NOTE.format('name the port only')}"
    assert asked("Which port is used by the gateway now?", *found[::-1]).endswith("name the port only)")


def test_without_a_similar_question_nothing_is_added():
    assert asked("Who painted the ceiling?", place_of(MAIL, "say how"), place_of(PORT, "short")) == (
        "Who painted the ceiling?"
    )
    assert asked(PORT) == PORT
    assert most_similar("", ["", PORT]) is None


def test_earlier_messages_stay_as_they_are():
    messages = [Message("user", MAIL), Message("assistant", "so"), Message("user", PORT)]
    request = with_feedback(ChatRequest.of(messages, {"max_tokens": 3}), [place_of(PORT, "short")])
    assert [message.content for message in request.messages[:2]] == [MAIL, "so"]
    assert request.sampling.max_tokens == 3


def test_feedback_is_a_document_in_place_of_earlier_feedback():
    request = feedback_request(PORT, "short", "notes")
    (document,) = request.documents
    assert (document.id, request.replace, request.store) == (f"feedback/{text_id(PORT)}", True, "notes")
    assert nearest_request(ChatRequest.of(PORT, {}), "notes").documents == ("feedback/",)
    for question, feedback, field in ((" ", "a", "question"), ("a", "", "feedback")):
        with pytest.raises(InvalidInput, match=f"{field} is empty"):
            feedback_request(question, feedback, None)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("models") / "chat", tokenizer)


def check_memory(lm: LanguageModel | Client) -> None:
    """Checks that a chat with a memory equals the chat with the question and its feedback."""
    lm.remember_feedback(MAIL, "say how", store="notes")
    lm.remember_feedback(PORT, "long", store="notes")
    lm.remember_feedback(PORT, "name the port only", store="notes")
    options = {"max_tokens": 8, "temperature": 0, "use_store": False}
    with_memory = lm.chat(PORT, memory="notes", **options).result()
    by_hand = lm.chat(f"{PORT}\n\n{NOTE.format('name the port only')}", **options).result()
    assert alike(with_memory.tokens, by_hand.tokens)  # the second is read from its last token on
    assert with_memory.finished.usage.prompt_tokens == by_hand.finished.usage.prompt_tokens
    with pytest.raises(NotFound, match="no datastore 'nowhere'"):
        lm.chat(PORT, memory="nowhere", **options)


def test_a_chat_with_memory_answers_the_question_with_its_feedback(chat_model, tmp_path):
    build_index(chat_model, [Document("a", "a gateway")], tmp_path / "notes", check="none")
    with LanguageModel(load_checkpoint(chat_model), [tmp_path / "notes"]) as lm:
        check_memory(lm)
        assert lm.get_datastore().num_documents == 3
        lm.delete_documents([f"feedback/{text_id(PORT)}"])
        alone = lm.chat(PORT, max_tokens=4, temperature=0, use_store=False).result()
        assert lm.chat(PORT, memory="notes", max_tokens=4, temperature=0, use_store=False).result().text == alone.text


def test_a_client_remembers_feedback_and_chats_with_it(chat_model, tmp_path):
    build_index(chat_model, [Document("a", "a gateway")], tmp_path / "notes", check="none")
    options = ("--threads", "1")
    with (
        RunningServer(tmp_path / "log", chat_model, tmp_path / "notes", options=options) as server,
        Client(server.address) as client,
    ):
        check_memory(client)


@pytest.mark.parametrize("metadata", [{"question": PORT}, {"question": 7, "feedback": "a"}, {"feedback": "a"}, {}])
def test_documents_that_are_no_feedback_are_passed_over(metadata):
    place = replace(place_of(PORT, "short"), metadata=metadata)
    assert asked(PORT, place) == PORT
