"""Nothing is lost or invented on the wire: requests, answers and errors come out as they went in."""

import dataclasses
import math
from dataclasses import fields
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlm import errors
from memlm.api import (
    answers,
    chat,
    datastores,
    generation,
    operations,
    params,
    passages,
    scoring,
    server,
    sessions,
    tracing,
)
from memlm.api.operations import JobReport, JobState, OperationInfo, OperationPage, SyncOutcome
from memlm.api.request import Request
from memlm.errors import Incompatible, InternalError, InvalidInput, MemlmError, NotFound, Overloaded
from memlm.v1 import generation_pb2
from memlm.wire import codec
from memlm.wire.status import CODES, MAX_MESSAGE_BYTES, error_of, trailer_of

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
prompts = text.filter(lambda drawn: "\0" not in drawn)
int32 = st.integers(0, 2**31 - 1)
number = st.floats(allow_nan=False)
time = st.sampled_from(["2024-05-01", "2024-05-01T09:30+02:00", "today"])


def maybe(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | values


sampling = st.builds(
    params.SamplingParams,
    max_tokens=maybe(st.integers(1, 2**31 - 1)),
    temperature=st.floats(0, 1e6),
    top_k=maybe(st.integers(1, 2**31 - 1)),
    top_p=maybe(st.floats(0, 1, exclude_min=True)),
    min_p=maybe(st.floats(0, 1)),
    repetition_penalty=st.floats(1e-3, 1e3),
    seed=maybe(st.integers(0, params.MAX_SEED)),
    stop=st.lists(text.filter(bool), max_size=4).map(tuple),
    time_limit_s=maybe(st.floats(1e-3, 1e6)),
)
weights = st.builds(params.StoreWeight, text, st.floats(1e-6, 1e6))
stores = st.lists(weights, max_size=3, unique_by=lambda each: each.name).map(tuple)
retrieval = st.builds(
    params.RetrievalParams,
    store=maybe(text),
    use_store=st.booleans(),
    k=maybe(st.integers(1, params.MAX_NEIGHBORS)),
    lam=maybe(st.floats(0, 1)),
    knn_temperature=maybe(st.floats(1e-6, 1e6)),
    nprobe=maybe(st.integers(1, 2**31 - 1)),
    as_of=maybe(time),
)
token_ids = st.lists(int32, min_size=2, max_size=5).map(tuple)
generate = st.builds(
    lambda prompt, **rest: params.GenerateRequest(**prompt, **rest),
    prompt=st.builds(dict, prompt=prompts) | st.builds(dict, prompt=st.just(""), prompt_token_ids=token_ids),
    sampling=sampling,
    retrieval=retrieval | st.builds(params.RetrievalParams, stores=stores),
    session=maybe(text),
    resume_s=maybe(st.floats(1e-3, params.MAX_RESUME_S)),
    neighbors=st.integers(0, params.MAX_NEIGHBORS),
    top_logprobs=st.integers(0, params.MAX_TOP_LOGPROBS),
    drafts=maybe(st.integers(0, params.MAX_DRAFTS)),
    draft=prompts,
)
store_name = st.from_regex(datastores.STORE_NAME, fullmatch=True)
share = st.floats(1e-6, 1, exclude_max=True)
glob = st.sampled_from(["**/*", "*.txt", "docs/ü*.md"])
index = st.sampled_from(["auto", "Flat", "IVF64,Flat", "OPQ8_32,IVF64,PQ8", "IVF64_HNSW32,SQfp16"])
document = st.builds(
    datastores.NewDocument,
    text.filter(bool),
    text.filter(lambda said: said.strip() and "\0" not in said),
    text,
    st.dictionaries(text, st.integers() | text, max_size=2),
)
path_hash = st.from_regex(datastores.HASH, fullmatch=True)
names = st.lists(text, max_size=2).map(tuple)
sync_outcome = st.builds(SyncOutcome, *[st.integers(0, 2**31 - 1)] * 5, *[names] * 4)
question = prompts.filter(str.strip)
shown = text.filter(lambda drawn: "\0" not in drawn)
passage = st.builds(
    passages.Passage,
    shown,
    shown,
    shown,
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    prompts,
    st.floats(0, 100),
    st.dictionaries(text, st.integers() | text, max_size=2),
)
requests = st.one_of(
    generate,
    st.builds(
        chat.ChatRequest,
        messages=st.lists(st.builds(chat.Message, st.sampled_from(["system", "user"]), prompts), min_size=1).map(tuple),
        sampling=sampling,
        retrieval=retrieval,
        session=maybe(text),
        resume_s=maybe(st.floats(1e-3, params.MAX_RESUME_S)),
        neighbors=st.integers(0, params.MAX_NEIGHBORS),
        drafts=maybe(st.integers(0, params.MAX_DRAFTS)),
        draft=prompts,
        adapter=maybe(text),
    ),
    st.builds(
        answers.AnswerRequest,
        question=question,
        passages=st.lists(passage, min_size=1, max_size=3).map(tuple),
        passage_stores=st.lists(text.filter(bool), max_size=3, unique=True).map(tuple),
        budget=maybe(st.integers(1, answers.MAX_BUDGET)),
        sampling=sampling,
        retrieval=retrieval,
        neighbors=st.integers(0, params.MAX_NEIGHBORS),
        session=maybe(text),
        adapter=maybe(text),
    ),
    st.builds(
        answers.AnswerRequest,
        question=question,
        num_passages=maybe(st.integers(0, answers.MAX_PASSAGES)),
        passages_by=st.sampled_from(passages.PassagesBy),
        mixture=st.just(True),
        sampling=sampling,
        top_logprobs=st.integers(0, params.MAX_TOP_LOGPROBS),
        resume_s=maybe(st.floats(1e-3, params.MAX_RESUME_S)),
    ),
    st.builds(
        answers.FindPassagesRequest,
        question=question,
        store=maybe(text),
        k=st.integers(1, params.MAX_NEIGHBORS),
        by=st.sampled_from(passages.PassagesBy),
        documents=st.lists(text, max_size=2).map(tuple),
        where=st.sampled_from([(), ("license=mit",)]),
        exclude_documents=st.lists(text.filter(bool), max_size=2).map(tuple),
        as_of=maybe(time),
    ),
    st.builds(scoring.ScoreRequest, text, retrieval, st.booleans()),
    st.builds(
        scoring.ScoreRequest, text, retrieval, st.just(True), top_logprobs=st.integers(0, params.MAX_TOP_LOGPROBS)
    ),
    st.builds(scoring.ScoreRequest, st.just(""), retrieval, st.booleans(), token_ids),
    st.builds(generation.TokenizeRequest, text),
    st.builds(generation.DetokenizeRequest, st.lists(int32, max_size=5).map(tuple)),
    st.builds(server.GetModelRequest),
    st.builds(server.GetServerInfoRequest),
    st.builds(sessions.CreateSessionRequest, maybe(st.floats(1e-3, 1e6)), maybe(text)),
    st.builds(sessions.AppendToSessionRequest, text, text, st.lists(int32, max_size=5).map(tuple)),
    st.builds(sessions.GetSessionRequest, text),
    st.builds(sessions.ListSessionsRequest, st.integers(0, 2**31 - 1), text),
    st.builds(sessions.ForgetInSessionRequest, text, st.integers(0, 99), st.integers(100, 2**63 - 1)),
    st.builds(sessions.ForkSessionRequest, text),
    st.builds(sessions.DeleteSessionRequest, text),
    st.builds(datastores.ListDatastoresRequest, st.integers(0, 2**31 - 1), text),
    st.builds(
        datastores.SearchRequest,
        text,
        maybe(text),
        st.integers(1, params.MAX_NEIGHBORS),
        maybe(st.integers(1, 2**31 - 1)),
        as_of=maybe(time),
    ),
    st.builds(
        tracing.TraceRequest,
        text,
        maybe(text),
        st.integers(2, tracing.MAX_MIN_TOKENS),
        st.floats(0, 1, exclude_min=True),
        st.integers(1, tracing.MAX_SPAN_DOCUMENTS),
        st.sampled_from(tracing.RankBy),
        st.lists(text, max_size=2).map(tuple),
        st.sampled_from([(), ("license=mit",)]),
        maybe(time),
    ),
    st.builds(generation.ResumeGenerationRequest, text, int32),
    st.builds(generation.CancelGenerationRequest, text),
    st.builds(datastores.GetDatastoreRequest, maybe(text)),
    st.builds(
        datastores.BuildDatastoreRequest,
        store=store_name,
        corpus=st.lists(text, min_size=1, max_size=3).map(tuple),
        glob=maybe(glob),
        index=maybe(index),
        target=maybe(share),
        max_ram_bytes=maybe(st.integers(1, 2**60)),
        drop_keys=st.booleans(),
        prune=maybe(share),
        stride=maybe(st.integers(1, 2**30)),
        seed=maybe(st.integers(0, 2**31 - 2)),
        replace=st.booleans(),
        request_id=text,
    ),
    st.builds(
        datastores.AddDocumentsRequest, maybe(text), st.booleans(), text, st.lists(document, max_size=2).map(tuple)
    ),
    st.builds(
        datastores.AddDocumentsRequest,
        store=maybe(text),
        documents=st.lists(
            st.builds(dataclasses.replace, document, file=st.from_regex(datastores.WAY, fullmatch=True)), max_size=2
        ).map(tuple),
        sync=text.filter(bool),
        keep=st.lists(path_hash, max_size=3).map(tuple),
        num_documents=int32,
        dry_run=st.booleans(),
    ),
    st.builds(
        datastores.RememberRequest,
        st.lists(document.filter(lambda each: not each.continues), min_size=1, max_size=3).map(tuple),
        maybe(text),
        st.booleans(),
    ),
    st.builds(datastores.CompactDatastoreRequest, maybe(text), text, st.booleans()),
    st.builds(datastores.LoadDatastoreRequest, text, maybe(store_name), st.booleans()),
    st.builds(datastores.UnloadDatastoreRequest, text),
    st.builds(operations.GetOperationRequest, text),
    st.builds(operations.ListOperationsRequest, st.integers(0, 2**31 - 1), text),
    st.builds(operations.WaitOperationRequest, text, st.integers(0, 10**6).map(lambda ms: ms / 1000)),
    st.builds(operations.CancelOperationRequest, text),
    st.builds(operations.DeleteOperationRequest, text),
    st.builds(datastores.DeleteDocumentsRequest, st.lists(text, min_size=1, max_size=5).map(tuple), maybe(text)),
)

neighbor = st.builds(
    generation.Neighbor,
    *(text, text, text, int32, int32, int32, int32, text),
    distance=number,
    weight=number,
    snippet=text,
    metadata=st.dictionaries(text, st.integers() | text | st.lists(st.booleans()), max_size=2),
)
token = st.builds(
    generation.Token,
    id=int32,
    text=text,
    bytes=st.binary(max_size=8),
    logprob=number,
    lm_logprob=number,
    knn_logprob=maybe(number | st.just(-math.inf)),
    lam=st.floats(0, 1),
    neighbors=st.lists(neighbor, max_size=2).map(tuple),
    top_logprobs=st.lists(st.builds(generation.Alternative, int32, text, number), max_size=2).map(tuple),
    passage_shares=st.lists(st.floats(0, 1), max_size=3).map(tuple),
)
draft_usage = st.builds(generation.DraftUsage, st.sampled_from(["request", "text"]), int32, int32, int32)
usage = st.builds(
    generation.Usage,
    *(int32, int32, int32, int32, number, number, number, number, number, int32),
    st.lists(draft_usage, max_size=2).map(tuple),
)
found = st.lists(passage, max_size=2).map(tuple)
told_events = st.one_of(
    st.builds(
        generation.Accepted,
        *(text, st.integers(0, 2**63 - 1), maybe(text), int32, number, number),
        maybe(st.builds(passages.AnswerPrompt, text, int32, found, st.lists(int32, max_size=2).map(tuple), found)),
    ),
    st.lists(token, min_size=1, max_size=3).map(tuple),
    st.builds(generation.Finished, st.sampled_from(generation.FinishReason), maybe(text), usage),
)

figures = st.builds(scoring.Figures, number, number, number, number)
alternatives = st.lists(st.builds(generation.Alternative, int32, text, number), max_size=2).map(tuple)
token_score = st.builds(scoring.TokenScore, int32, text, number, number, maybe(number), alternatives)
score = st.builds(
    scoring.Score,
    tokens=int32,
    words=int32,
    bytes=int32,
    base=figures,
    knn=maybe(figures),
    store=maybe(text),
    k=maybe(int32),
    lam=maybe(number),
    knn_temperature=maybe(number),
    token_scores=st.lists(token_score, max_size=3).map(tuple),
)
store_info = st.builds(
    datastores.StoreInfo,
    text,
    text,
    int32,
    int32,
    int32,
    int32,
    int32,
    text,
    number,
    int32,
    number,
    number,
    maybe(text),
)
model_info = st.builds(server.ModelInfo, text, int32, int32, int32, int32, int32, text, text, text)
delete_report = st.builds(datastores.DeleteReport, text, int32, int32, int32)


time_s = st.floats(0, 1e10)
operation_info = (
    st.builds(
        OperationInfo,
        name=text,
        kind=text,
        store=text,
        state=st.sampled_from(JobState),
        phase=text,
        done=int32,
        total=int32,
        per_s=time_s,
        left_s=maybe(time_s),
        created_s=time_s,
        started_s=maybe(time_s),
        ended_s=maybe(time_s),
        attempts=int32,
        skipped=int32,
    )
    | st.builds(
        OperationInfo,
        name=text,
        kind=text,
        store=text,
        state=st.just(JobState.DONE),
        report=maybe(st.builds(JobReport, text, int32, int32, int32, text, time_s, time_s, int32, maybe(sync_outcome))),
        error=st.none(),
    )
    | st.builds(
        OperationInfo,
        name=text,
        kind=text,
        store=text,
        state=st.just(JobState.FAILED),
        error=st.builds(Incompatible, text) | st.builds(InvalidInput, text),
    )
)


# Fields of google.longrunning that are refused, or never set.
NOT_OURS = {
    operations.ListOperationsRequest: {"filter", "name", "return_partial_success"},
    operations.OperationPage: {"unreachable"},
}


def over_the_wire(request: Request[Any], answer: object) -> object:
    reply = codec.response_to_wire(request, answer)
    return codec.response_from_wire(request, type(reply).FromString(reply.SerializeToString()))


@given(requests)
def test_a_request_comes_out_as_it_went_in(request: Request[Any]) -> None:
    message = codec.to_wire(request)
    assert codec.from_wire(codec.read_request(type(message), message.SerializeToString())) == request


@given(told_events)
def test_an_event_comes_out_as_it_went_in(event: generation.GenerationEvent) -> None:
    encoded = tuple(map(codec.token_to_wire, event)) if isinstance(event, tuple) else event
    message = generation_pb2.GenerateEvent.FromString(codec.event_to_wire(encoded))
    assert codec.event_from_wire(message) == event
    if isinstance(event, tuple):  # tokens have a shorter way of their own
        assert list(message.tokens.tokens) == [codec.to_wire(token) for token in event]
        assert codec.tokens_from_wire(encoded) == event


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 200, 30_000])
def test_tokens_that_are_joined_unread_are_the_event_of_a_message(num_tokens: int) -> None:
    """Lengths of one, two and three bytes are written as protobuf writes them."""
    encoded = (codec.token_to_wire(generation.Token(7, " the", b" the", -1.5, -2.0)),) * num_tokens
    message = generation_pb2.GenerateEvent(tokens=generation_pb2.Tokens.FromString(b"".join(encoded)))
    assert codec.event_to_wire(encoded) == message.SerializeToString()


traced_span = st.builds(
    tracing.TracedSpan, int32, int32, int32, text, number, int32, st.lists(neighbor, max_size=2).map(tuple)
)


@given(score)
def test_a_score_comes_out_as_it_went_in(answer: scoring.Score) -> None:
    assert over_the_wire(scoring.ScoreRequest("text"), answer) == answer


@given(st.builds(tracing.Trace, int32, int32, st.lists(traced_span, max_size=3).map(tuple)))
def test_a_trace_comes_out_as_it_went_in(trace: tracing.Trace) -> None:
    assert over_the_wire(tracing.TraceRequest("text"), trace) == trace


@given(st.lists(store_info, max_size=3), model_info, delete_report, st.lists(neighbor, max_size=3))
def test_other_answers_come_out_as_they_went_in(
    stores: list[datastores.StoreInfo],
    model: server.ModelInfo,
    deleted: datastores.DeleteReport,
    found: list[generation.Neighbor],
) -> None:
    page = datastores.DatastorePage(tuple(stores), "token")
    assert over_the_wire(datastores.ListDatastoresRequest(), page) == page
    assert over_the_wire(server.GetModelRequest(), model) == model
    assert over_the_wire(datastores.DeleteDocumentsRequest(("a",)), deleted) == deleted
    assert over_the_wire(datastores.SearchRequest("text"), found) == tuple(found)
    remembered = datastores.RememberReport("notes", 3, 12, ("a", "b"))
    assert over_the_wire(datastores.RememberRequest.of("text", None), remembered) == remembered


@given(operation_info, st.text("abc", max_size=3))
def test_an_operation_comes_out_as_it_went_in(info: OperationInfo, token: str) -> None:
    returned = over_the_wire(operations.GetOperationRequest("x"), info)
    assert (type(returned.error), str(returned.error)) == (type(info.error), str(info.error))
    assert dataclasses.replace(returned, error=None) == dataclasses.replace(info, error=None)
    if info.error is None:
        page = OperationPage((info, info), token)
        assert over_the_wire(operations.ListOperationsRequest(), page) == page
    assert over_the_wire(operations.DeleteOperationRequest("x"), None) is None


@given(st.lists(int32, max_size=5), text)
def test_tokens_and_texts_come_out_as_they_went_in(token_ids: list[int], plain: str) -> None:
    assert over_the_wire(generation.TokenizeRequest("text"), token_ids) == tuple(token_ids)
    assert over_the_wire(generation.DetokenizeRequest((1,)), plain) == plain


def test_not_set_and_zero_differ() -> None:
    """Sampling scalars are optional on the wire: 0 is greedy, not set is the model's own."""
    nothing = codec.from_wire(generation_pb2.GenerateRequest(prompt="a"))
    assert nothing == params.GenerateRequest("a")
    assert nothing.sampling.temperature is None
    zero = generation_pb2.SamplingParams(temperature=0, min_p=0, seed=0)
    assert codec.from_wire(zero) == params.SamplingParams(temperature=0, min_p=0, seed=0)
    assert codec.from_wire(generation_pb2.RetrievalParams(lam=0)) == params.RetrievalParams(lam=0.0)
    assert nothing.drafts is None
    assert codec.from_wire(generation_pb2.GenerateRequest(prompt="a", drafts=0)).drafts == 0


def test_no_field_is_forgotten() -> None:
    """Each record has the fields of its message, no more and no less."""
    for record, message in codec._MESSAGE_OF.items():
        names = {
            codec._RENAMED.get((record, field.name), field.name)
            for field in fields(record)
            if (record, field.name) not in codec._ENVELOPE
        }
        on_wire = set(message.DESCRIPTOR.fields_by_name)
        assert names == on_wire - NOT_OURS.get(record, set()), record


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_nan_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInput, match=name) as raised:
        codec.from_wire(generation_pb2.SamplingParams(**{name: math.nan}))
    assert raised.value.field == name


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (params.SamplingParams(max_tokens=2**40), "max_tokens"),
        (params.RetrievalParams(store="\ud800"), "store"),
        (generation.TokenizeRequest(5), "text"),  # type: ignore[arg-type]
        (generation.DetokenizeRequest((2**40,)), "token_ids"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_name(record: object, field: str) -> None:
    with pytest.raises(InvalidInput, match=field) as raised:
        codec.to_wire(record)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"\x0a\x02\xff\xfe", "prompt"),
        (b"\x0a\x01a\x12\x04\x42\x02\xff\xfe", "sampling.stop"),
        (b"\x0a\xff", ""),
        (b"\xff\xff\xff", ""),
    ],
)
def test_bytes_that_are_no_request_are_refused(data: bytes, field: str) -> None:
    with pytest.raises(InvalidInput, match="not valid UTF-8" if field else "not the bytes") as raised:
        codec.read_request(generation_pb2.GenerateRequest, data)
    assert raised.value.field == field


def test_a_field_of_another_version_is_refused() -> None:
    """A newer client's option would else be ignored silently."""
    for data in (b"\x0a\x01a\xa8\x06\x01", b"\x12\x03\xa8\x06\x01"):  # field 101, outside and inside `sampling`
        with pytest.raises(InvalidInput, match="field 101"):
            codec.read_request(generation_pb2.GenerateRequest, data)


def test_an_event_of_another_version_is_an_error() -> None:
    with pytest.raises(InternalError, match="does not know"):
        codec.event_from_wire(generation_pb2.GenerateEvent())


@given(st.lists(text, min_size=1, max_size=2) | text)
def test_a_lone_document_id_is_not_taken_for_a_list(ids: list[str] | str) -> None:
    if isinstance(ids, str):
        with pytest.raises(InvalidInput, match="in a list"):
            datastores.DeleteDocumentsRequest.of(ids, None)
    else:
        assert datastores.DeleteDocumentsRequest.of(ids, None).document_ids == tuple(ids)


@pytest.mark.parametrize("count", [0, datastores.MAX_DOCUMENT_IDS + 1])
def test_one_call_deletes_some_documents_but_not_too_many(count: int) -> None:
    with pytest.raises(InvalidInput, match="1 to 10000") as raised:
        datastores.DeleteDocumentsRequest(("a",) * count)
    assert raised.value.field == "document_ids"


class FailedCall(grpc.RpcError):
    """A call's end as gRPC tells it to a client."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...] = ()) -> None:
        super().__init__(details)
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._metadata


ERRORS = [
    kind for name in errors.__all__ if isinstance(kind := getattr(errors, name), type) and kind is not errors.MemlmError
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_comes_out_as_the_same_class_with_the_same_words(kind: type[MemlmError]) -> None:
    sent = kind("what was wrong; what to try: größer 猫")
    received = error_of(FailedCall(*trailer_of(sent)), "host:1")
    assert type(received) is kind
    assert str(received) == str(sent)
    assert vars(received) == vars(sent)


def test_details_come_along() -> None:
    for sent in (
        InvalidInput("no", field="top_k"),
        NotFound("no", kind="datastore", name="docs"),
        Overloaded("no", retry_after_s=2.5),
    ):
        assert vars(error_of(FailedCall(*trailer_of(sent)), "host:1")) == vars(sent)


def test_every_error_has_its_code() -> None:
    assert set(CODES) == set(ERRORS)


@given(text, st.integers(1, 5000))
def test_a_long_message_still_fits_into_the_trailers(piece: str, times: int) -> None:
    """gRPC drops trailers above 8 KiB, and the reason with them."""
    sent = InvalidInput(f"begin {piece * times} end", field=piece * times)
    trailer = trailer_of(sent)
    assert len(trailer.details.encode()) <= MAX_MESSAGE_BYTES
    assert 3 * len(trailer.details.encode()) + 4 / 3 * len(trailer.trailing_metadata[0][1]) < 8000
    assert trailer.details.startswith("begin")
    assert trailer.details.endswith("end")


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable, "memlm serve"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded, "timeout_s"),
        (grpc.StatusCode.CANCELLED, errors.Cancelled, "host:1"),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Incompatible, "same version"),
        (grpc.StatusCode.UNKNOWN, errors.InternalError, "UNKNOWN"),
    ],
)
def test_what_grpc_itself_says_is_told_in_our_words(code: grpc.StatusCode, kind: type[MemlmError], says: str) -> None:
    error = error_of(FailedCall(code, "some reason"), "host:1")
    assert type(error) is kind
    assert says in str(error)


def test_anothers_details_are_no_reason_to_fail() -> None:
    metadata = (("grpc-status-details-bin", b"\xff\xff"),)
    error = error_of(FailedCall(grpc.StatusCode.UNAVAILABLE, "proxy", metadata), "host:1")
    assert type(error) is errors.Unavailable
