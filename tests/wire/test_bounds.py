"""What a message may make of its bytes is bounded before it is parsed."""

from contextlib import suppress

import pytest
from google.protobuf.message import Message

from memlm.api.datastores import MAX_DOCUMENT_IDS
from memlm.api.generation import DetokenizeRequest, TokenizeRequest
from memlm.api.prompts import MAX_TOKEN_IDS
from memlm.errors import InvalidInput
from memlm.v1 import datastores_pb2, generation_pb2, sessions_pb2
from memlm.wire import codec
from memlm.wire.bounds import MAX_FIELDS

MANY = 400_000


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (datastores_pb2.DeleteDocumentsRequest(document_ids=["a"] * MANY), "document_ids"),
        (datastores_pb2.BuildDatastoreRequest(corpus=["a"] * MANY), "corpus"),
        (datastores_pb2.AddDocumentsRequest(documents=[datastores_pb2.Document()] * MANY), "documents"),
        (generation_pb2.GenerateRequest(sampling=generation_pb2.SamplingParams(stop=["a"] * MANY)), "stop"),
        (generation_pb2.GenerateRequest(retrieval={"stores": [generation_pb2.StoreWeight()] * MANY}), "stores"),
        (generation_pb2.DetokenizeRequest(token_ids=[300] * (MAX_TOKEN_IDS + 1)), "token_ids"),
        (sessions_pb2.AppendToSessionRequest(token_ids=[5] * (MAX_TOKEN_IDS + 1)), "token_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_message_of_too_many_entries_is_refused_unparsed(
    message: Message, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, request_type = message.SerializeToString(), type(message)
    monkeypatch.setattr(codec, "_refuse_unknown", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(InvalidInput, match=f"{field} has more than .* entries") as refused:
        codec.read_request(request_type, data)
    assert refused.value.field == field


def test_a_message_at_the_bounds_is_taken() -> None:
    ids = codec.from_wire(
        codec.read_request(
            generation_pb2.DetokenizeRequest,
            generation_pb2.DetokenizeRequest(token_ids=[300] * MAX_TOKEN_IDS).SerializeToString(),
        )
    )
    assert ids == DetokenizeRequest((300,) * MAX_TOKEN_IDS)
    documents = [datastores_pb2.Document(id="a" * 30, text="b" * 50)] * (MAX_FIELDS // 3)
    data = datastores_pb2.AddDocumentsRequest(documents=documents).SerializeToString()
    assert len(codec.read_request(datastores_pb2.AddDocumentsRequest, data).documents) == len(documents)
    assert MAX_DOCUMENT_IDS < MAX_FIELDS
    prompt = generation_pb2.GenerateRequest(prompt="\n" * 3_000_000)
    assert codec.read_request(generation_pb2.GenerateRequest, prompt.SerializeToString()) == prompt


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 100_000])
def test_bytes_that_end_too_early_are_left_to_the_parser(cut: int) -> None:
    data = datastores_pb2.DeleteDocumentsRequest(document_ids=["abcdef"] * 60_000).SerializeToString()
    for broken in (data[:-cut], b"\xff" * 200_000, b"\x0a" + b"\x80" * 200_000):
        with suppress(InvalidInput):
            codec.read_request(datastores_pb2.DeleteDocumentsRequest, broken)


def test_token_ids_travel_as_they_are() -> None:
    """Not one by one: there may be a million of them."""
    ids = tuple(range(1000))
    assert codec.to_wire(DetokenizeRequest(ids)).token_ids == list(ids)
    request = TokenizeRequest("a")
    assert codec.response_from_wire(request, codec.response_to_wire(request, list(ids))) == ids
