"""OpenAI's client sees the passages behind a chat as annotations, whole and streamed, each small and none false."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import openai
import pytest
from openai.types.chat.chat_completion_message import Annotation
from running import RunningServer

from memlm.api.generation import Accepted, Finished, FinishReason, Token, Usage
from memlm.api.passages import AnswerPrompt, Passage, Sentence
from memlm.client import Client
from memlm.data.corpus import Corpus, Document
from memlm.indexing.build import build_index
from memlm.server.http.answers import ChoiceAnswer
from memlm.server.http.openai import AnswerForm
from memlm.server.http.records import annotations_of, url_of

GREEDY = {"max_tokens": 6, "temperature": 0}
ASKED = [{"role": "user", "content": "the gateway: which port?"}]
DOCUMENTS = [
    Document("notes/a b#1?.md", "The roof is red.\nThe gateway has the port 7443.\nIt is here.", "Ports, in short"),
    Document("page", "The gateway forwards.", metadata={"url": "https://example.org/gate#way", "more": "x" * 9000}),
    Document("other", "The sea is blue."),
]
PLACED = {"title": "", "token_offset": 0, "num_tokens": 1, "text": "It is so.", "score": 1.0}
URI = "memlm:stored/notes/a%20b%231%3F.md#L1-L3"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("cited")
    build_index(model_folder, Corpus(DOCUMENTS), folder / "stored", check="none")
    options = ("--threads", "1", "--http-port", "0", "--attention-window", "44")  # with room for passages
    with RunningServer(folder / "log", model_folder, folder / "stored", options=options) as running:
        yield running


@pytest.fixture
def cited(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def passage(**fields: Any) -> Passage:
    return Passage(**{"store": "store", "document_id": "a.md", **PLACED, **fields})


def citations(passages: list[Passage], text: str, numbers: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    prompt = AnswerPrompt("", 1, tuple(passages), numbers or tuple(range(1, len(passages) + 1)))
    return [each["url_citation"] for each in annotations_of(prompt, text)]


def test_each_passage_is_a_citation_of_openais_shape(cited: openai.OpenAI, server: RunningServer) -> None:
    """Strictly: the client itself checks nothing that it reads."""
    message = cited.chat.completions.create(
        model="tiny", messages=ASKED, extra_body={"memory": {"passages": 2}}, **GREEDY
    ).choices[0]
    shown = message.message.annotations
    with Client(server.address) as ours:
        wanted = ours.chat(ASKED[0]["content"], num_passages=2, **GREEDY).result().accepted.prompt.passages
    assert len(shown) == 2 == len(wanted)
    for annotation, found in zip(shown, wanted, strict=True):
        Annotation.model_validate(annotation.model_dump(), strict=True)
        assert annotation.url_citation.url == url_of(found)
        assert annotation.url_citation.content == found.sentence.text
    first, second = (each.url_citation for each in sorted(shown, key=lambda each: each.url_citation.url, reverse=True))
    assert (first.url, first.title) == (URI, "Ports, in short (notes/a b#1?.md:2)")
    assert first.content == "The gateway has the port 7443."
    assert (second.url, second.title) == ("https://example.org/gate#way", "page:1")
    assert first.start_index == first.end_index == len(message.message.content)
    assert len(str(shown)) < 1000  # without the metadata


def test_a_stream_ends_with_the_same_citations(cited: openai.OpenAI) -> None:
    """In one event, the last of its choice, as OpenAI sends them."""
    asked = {"model": "tiny", "messages": ASKED, "n": 2, **GREEDY}
    whole = cited.chat.completions.create(**asked)
    chunks = [each for chunk in cited.chat.completions.create(stream=True, **asked) for each in chunk.choices]
    for number in range(2):
        events = [each for each in chunks if each.index == number]
        assert not any("annotations" in (each.delta.model_extra or {}) for each in events[:-1])
        assert (events[-1].finish_reason, events[-1].delta.content) == ("length", None)
        wanted = [each.model_dump() for each in whole.choices[number].message.annotations]
        assert events[-1].delta.model_extra["annotations"] == wanted
    with cited.chat.completions.stream(**asked) as stream:  # which joins the events again
        stream.until_done()
        joined = stream.current_completion_snapshot.choices
    assert [each.message.annotations for each in joined] == [each.message.annotations for each in whole.choices]


@pytest.mark.parametrize("memory", [{"passages": 0}, {"stores": []}])
def test_an_answer_from_no_passage_has_no_citation(cited: openai.OpenAI, memory: dict[str, Any]) -> None:
    extra = {"memory": memory}
    message = cited.chat.completions.create(model="tiny", messages=ASKED, extra_body=extra, **GREEDY).choices[0].message
    assert "annotations" not in message.to_dict()


def test_citations_may_come_back_with_the_next_question(cited: openai.OpenAI) -> None:
    message = cited.chat.completions.create(model="tiny", messages=ASKED, **GREEDY).choices[0].message
    assert message.annotations
    longer = [*ASKED, message.to_dict(), *ASKED]
    assert cited.chat.completions.create(model="tiny", messages=longer, **GREEDY).choices[0].message.annotations


def test_a_citation_spans_the_number_that_names_it() -> None:
    passages = [passage(), passage(), passage()]
    text = "So it is [3], and [1, 3]. [x] [7]"
    spans = [(each["start_index"], each["end_index"]) for each in citations(passages, text, (1, 2, 3))]
    assert spans == [(18, 24), (len(text), len(text)), (9, 12)]
    assert (text[18:24], text[9:12]) == ("[1, 3]", "[3]")
    assert citations([passage()], "[4]", (4,))[0]["end_index"] == 3  # numbers are those of the prompt
    assert citations([passage()], "[" + "1" * 5000 + "] [1]")[0]["start_index"] == 5003


def test_the_pieces_of_a_stream_count_as_one_text() -> None:
    form = AnswerForm("tiny", is_chat=True, is_stream=True)
    answer = ChoiceAnswer(0, form)
    answer.add_accepted(Accepted("", 1, None, 1, 0.0, 1.0, prompt=AnswerPrompt("", 1, (passage(),), (1,))))
    for text in ("So [", "1", "]."):
        answer.add_tokens([Token(0, text, text.encode(), 0.0, 0.0)])
        answer.event()
    answer.add_finished(Finished(FinishReason.END, None, Usage(1, 3)))
    assert b'"start_index":3,"end_index":6' in answer.event()


def test_a_prompt_that_had_room_for_no_passage_has_no_citation() -> None:
    answer = ChoiceAnswer(0, AnswerForm("tiny", is_chat=True))
    answer.add_accepted(Accepted("", 1, None, 1, 0.0, 1.0, prompt=AnswerPrompt("", 1, left_out=(passage(),))))
    answer.finish("stop")
    assert answer.whole()["message"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "given",
    [
        "javascript:alert(1)", "file:///etc/passwd", "memlm:other/b.md", "https://", "https://[::1", "http://a b/",
        "https://e.org/\n", "https://e.org/" + "x" * 2000, "ftp://e.org", "//e.org/a", 7, None, ["https://e.org"],
        "http://a:port/", "http://a:99999/", "http://exa<mple/", "http://a\\b/", 'http://a/"><script>', "http:///a",
    ],
)  # fmt: skip
def test_an_address_of_a_document_is_one_of_the_web(given: object) -> None:
    assert url_of(passage(metadata={"url": given}, first_line=3, last_line=9)) == "memlm:store/a.md#L3-L9"
    other = {"url": given, "source": "http://e.org/?a=1"}
    assert url_of(passage(metadata=other)) == "http://e.org/?a=1"


def test_a_uri_names_its_document_and_place() -> None:
    """Each passage has its own: clients join the sources of one address."""
    found = passage(store="a/b", document_id="über/ü?#%.pdf", first_page=3, last_page=3, first_line=7, last_line=8)
    parts = urlsplit(url_of(found))
    store, document = parts.path.split("/", 1)
    assert (parts.scheme, unquote(store), unquote(document)) == ("memlm", "a/b", found.document_id)
    assert parts.fragment == "page=3"
    assert len({url_of(passage(first_line=each, last_line=each + 1)) for each in range(9)}) == 9


def test_a_citation_is_small_whatever_its_document_is_called() -> None:
    long = "ü" * 100_000
    for found in (
        passage(document_id=long, title=long, metadata={"url": long, "source": long}),
        passage(store=long, text=long, sentence=Sentence(long)),
    ):
        (each,) = citations([found], long)
        assert max(len(each["url"]) - 2000, len(each["title"]) - 500, len(each["content"]) - 1000) <= 0
    assert url_of(passage(document_id=long)) == "memlm:store"  # and no id that is another one's
