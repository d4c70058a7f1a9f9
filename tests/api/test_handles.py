"""Streams that are joined, and what a session at the Python prompt shows of each object."""

from dataclasses import replace

import pytest

from memlm.api.answers import Answer
from memlm.api.generation import Accepted, Completion, Finished, FinishReason, Neighbor, Token, Usage
from memlm.api.handles import Operation
from memlm.api.passages import AnswerPrompt, Passage
from memlm.client import AsyncClient, Client
from memlm.errors import InvalidInput
from memlm.index.store.datastore import Datastore

PROMPT = "the memory of a"
OPTIONS = {"seed": 3, "max_tokens": 8, "neighbors": 2}


def test_the_result_of_a_stream_is_the_whole_generation(lm):
    stream = lm.generate(PROMPT, **OPTIONS)
    taken = [next(stream), next(stream)]
    completion = stream.result()
    assert completion.tokens[:2] == tuple(taken)
    assert completion.tokens == tuple(lm.generate(PROMPT, **OPTIONS))
    assert completion.text == str(completion) == "".join(token.text for token in completion.tokens)
    assert (completion.accepted, completion.finished) == (stream.accepted, stream.finished)
    assert stream.result() == completion


def test_a_stream_that_was_closed_early_has_no_result(lm):
    stream = lm.generate(PROMPT, **OPTIONS)
    next(stream)
    stream.close()
    with pytest.raises(InvalidInput, match="closed before its end"):
        stream.result()


def test_objects_say_what_they_are(lm, store_folder):
    stream = lm.generate(PROMPT, **OPTIONS)
    assert repr(stream) == "<TokenStream of 0 tokens, running; iterate it, or take its result()>"
    stream.result()
    assert repr(stream).startswith("<TokenStream of 8 tokens, ended: length;")
    assert repr(lm).startswith("<LanguageModel tiny: ")
    assert f"datastores: store of {lm.stores[0].num_entries:,} entries>" in repr(lm)
    session = lm.session()
    assert repr(session) == f"<Session {session.name}>"
    with Datastore.open(store_folder) as store:
        assert repr(store).endswith(f"{store.snapshot.num_entries:,} entries of 8 documents>")
    with Client() as client:
        assert repr(client) == "<Client localhost:50051>"
        assert repr(Operation(client.operations, "operations/1")) == "<Operation operations/1>"


async def test_the_awaited_client_says_what_it_is():
    async with AsyncClient("a:1") as client:
        assert repr(client) == "<AsyncClient a:1>"


def completion_of(*tokens: Token) -> Completion:
    text = "".join(token.text for token in tokens)
    return Completion(text, tokens, Accepted("id", 1, None, 0, 0.0, 0.0), Finished(FinishReason.END, None, Usage()))


def test_a_notebook_shows_shares_and_escapes_text():
    source = Neighbor("s", '<i>"doc"', "", 0, 0, 7, 5, "", 0.0, 1.0, "")
    loud = Token(5, "<b>&\n", b"", 0.0, 0.0, 0.0, 0.8, (source,))
    html = completion_of(Token(4, "<i>", b"", 0.0, 0.0), loud)._repr_html_()
    assert "&lt;i&gt;" in html
    assert "&lt;b&gt;&amp;\n</span>" in html
    assert "<b>" not in html
    assert "<i>" not in html
    assert 'title="80% from memory: &lt;i&gt;&quot;doc&quot;, line 7"' in html
    assert "rgba(0, 150, 136, 0.48)" in html
    assert html.count("<span") == 1
    assert "2 tokens, 40% from memory" in html
    assert "0 tokens, 0% from memory" in completion_of()._repr_html_()


def test_a_notebook_names_the_passages_of_each_token_of_a_mixture():
    passages = tuple(Passage("s", name, "", 0, 9, "text", 1.0, first_line=3) for name in ("a.md", '<i>"b"', "c.md"))
    accepted = Accepted("id", 1, None, 0, 0.0, 0.0, AnswerPrompt("", 9, passages, (1, 2, 3)))
    tokens = (Token(5, "one", b"", 0.0, 0.0, passage_shares=(0.2, 0.7, 0.004)),)
    tokens += (Token(6, "two", b"", 0.0, 0.0, passage_shares=(0.01, 0.02, 0.01)),)
    answer = Answer.of(Completion("onetwo", tokens, accepted, Finished(FinishReason.END, None, Usage())))
    html = answer._repr_html_()
    assert html == answer.completion._repr_html_()
    assert 'title="70% &lt;i&gt;&quot;b&quot;:3\n20% a.md:3">one</span>two' in html
    assert "2 tokens, 47% from 3 passages" in html
    assert answer.passage_shares == pytest.approx([0.105, 0.36, 0.007])
    plain = replace(answer.completion, tokens=(Token(5, "one", b"", 0.0, 0.0),))
    assert "1 tokens, from 3 passages" in plain._repr_html_()
