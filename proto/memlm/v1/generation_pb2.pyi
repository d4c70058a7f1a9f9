from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PassagesBy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PASSAGES_BY_UNSPECIFIED: _ClassVar[PassagesBy]
    PASSAGES_BY_WORDS: _ClassVar[PassagesBy]
    PASSAGES_BY_MEANING: _ClassVar[PassagesBy]
    PASSAGES_BY_AUTO: _ClassVar[PassagesBy]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_END: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TIME: _ClassVar[FinishReason]

class RankBy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANK_BY_UNSPECIFIED: _ClassVar[RankBy]
    RANK_BY_RARITY: _ClassVar[RankBy]
    RANK_BY_LENGTH: _ClassVar[RankBy]
PASSAGES_BY_UNSPECIFIED: PassagesBy
PASSAGES_BY_WORDS: PassagesBy
PASSAGES_BY_MEANING: PassagesBy
PASSAGES_BY_AUTO: PassagesBy
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_END: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TIME: FinishReason
RANK_BY_UNSPECIFIED: RankBy
RANK_BY_RARITY: RankBy
RANK_BY_LENGTH: RankBy

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "repetition_penalty", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "time_limit_s")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    repetition_penalty: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    time_limit_s: float
    def __init__(self, max_tokens: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., time_limit_s: _Optional[float] = ...) -> None: ...

class RetrievalParams(_message.Message):
    __slots__ = ("store", "without_store", "k", "lam", "knn_temperature", "nprobe", "spalm", "stores", "loop_guard", "exclude_documents", "context_cache", "as_of")
    STORE_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_STORE_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    LAM_FIELD_NUMBER: _ClassVar[int]
    KNN_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    NPROBE_FIELD_NUMBER: _ClassVar[int]
    SPALM_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    LOOP_GUARD_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_CACHE_FIELD_NUMBER: _ClassVar[int]
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    store: str
    without_store: bool
    k: int
    lam: float
    knn_temperature: float
    nprobe: int
    spalm: bool
    stores: _containers.RepeatedCompositeFieldContainer[StoreWeight]
    loop_guard: bool
    exclude_documents: _containers.RepeatedScalarFieldContainer[str]
    context_cache: int
    as_of: str
    def __init__(self, store: _Optional[str] = ..., without_store: bool = ..., k: _Optional[int] = ..., lam: _Optional[float] = ..., knn_temperature: _Optional[float] = ..., nprobe: _Optional[int] = ..., spalm: bool = ..., stores: _Optional[_Iterable[_Union[StoreWeight, _Mapping]]] = ..., loop_guard: bool = ..., exclude_documents: _Optional[_Iterable[str]] = ..., context_cache: _Optional[int] = ..., as_of: _Optional[str] = ...) -> None: ...

class StoreWeight(_message.Message):
    __slots__ = ("name", "weight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: float
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "sampling", "retrieval", "neighbors", "top_logprobs", "early_exit", "session", "resume_s", "prompt_token_ids", "drafts", "draft", "adapter")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    NEIGHBORS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EARLY_EXIT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESUME_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    sampling: SamplingParams
    retrieval: RetrievalParams
    neighbors: int
    top_logprobs: int
    early_exit: bool
    session: str
    resume_s: float
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    drafts: int
    draft: str
    adapter: str
    def __init__(self, prompt: _Optional[str] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., retrieval: _Optional[_Union[RetrievalParams, _Mapping]] = ..., neighbors: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., early_exit: bool = ..., session: _Optional[str] = ..., resume_s: _Optional[float] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., drafts: _Optional[int] = ..., draft: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("messages", "sampling", "retrieval", "neighbors", "top_logprobs", "early_exit", "session", "resume_s", "drafts", "draft", "adapter", "num_passages")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    NEIGHBORS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EARLY_EXIT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESUME_S_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    sampling: SamplingParams
    retrieval: RetrievalParams
    neighbors: int
    top_logprobs: int
    early_exit: bool
    session: str
    resume_s: float
    drafts: int
    draft: str
    adapter: str
    num_passages: int
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., retrieval: _Optional[_Union[RetrievalParams, _Mapping]] = ..., neighbors: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., early_exit: bool = ..., session: _Optional[str] = ..., resume_s: _Optional[float] = ..., drafts: _Optional[int] = ..., draft: _Optional[str] = ..., adapter: _Optional[str] = ..., num_passages: _Optional[int] = ...) -> None: ...

class Passage(_message.Message):
    __slots__ = ("store", "document_id", "title", "token_offset", "num_tokens", "text", "score", "metadata", "first_line", "last_line", "headings", "first_page", "last_page", "also", "sentence")
    STORE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_ID_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    FIRST_LINE_FIELD_NUMBER: _ClassVar[int]
    LAST_LINE_FIELD_NUMBER: _ClassVar[int]
    HEADINGS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    LAST_PAGE_FIELD_NUMBER: _ClassVar[int]
    ALSO_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    store: str
    document_id: str
    title: str
    token_offset: int
    num_tokens: int
    text: str
    score: float
    metadata: str
    first_line: int
    last_line: int
    headings: _containers.RepeatedScalarFieldContainer[str]
    first_page: int
    last_page: int
    also: _containers.RepeatedScalarFieldContainer[str]
    sentence: Sentence
    def __init__(self, store: _Optional[str] = ..., document_id: _Optional[str] = ..., title: _Optional[str] = ..., token_offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., text: _Optional[str] = ..., score: _Optional[float] = ..., metadata: _Optional[str] = ..., first_line: _Optional[int] = ..., last_line: _Optional[int] = ..., headings: _Optional[_Iterable[str]] = ..., first_page: _Optional[int] = ..., last_page: _Optional[int] = ..., also: _Optional[_Iterable[str]] = ..., sentence: _Optional[_Union[Sentence, _Mapping]] = ...) -> None: ...

class Sentence(_message.Message):
    __slots__ = ("text", "offset", "line", "page", "words")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    offset: int
    line: int
    page: int
    words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, text: _Optional[str] = ..., offset: _Optional[int] = ..., line: _Optional[int] = ..., page: _Optional[int] = ..., words: _Optional[_Iterable[str]] = ...) -> None: ...

class AnswerRequest(_message.Message):
    __slots__ = ("question", "passages", "num_passages", "passages_by", "passage_stores", "budget", "mixture", "sampling", "retrieval", "neighbors", "top_logprobs", "early_exit", "session", "resume_s", "drafts", "draft", "adapter")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    PASSAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSAGES_FIELD_NUMBER: _ClassVar[int]
    PASSAGES_BY_FIELD_NUMBER: _ClassVar[int]
    PASSAGE_STORES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    MIXTURE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    NEIGHBORS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EARLY_EXIT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESUME_S_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    question: str
    passages: _containers.RepeatedCompositeFieldContainer[Passage]
    num_passages: int
    passages_by: PassagesBy
    passage_stores: _containers.RepeatedScalarFieldContainer[str]
    budget: int
    mixture: bool
    sampling: SamplingParams
    retrieval: RetrievalParams
    neighbors: int
    top_logprobs: int
    early_exit: bool
    session: str
    resume_s: float
    drafts: int
    draft: str
    adapter: str
    def __init__(self, question: _Optional[str] = ..., passages: _Optional[_Iterable[_Union[Passage, _Mapping]]] = ..., num_passages: _Optional[int] = ..., passages_by: _Optional[_Union[PassagesBy, str]] = ..., passage_stores: _Optional[_Iterable[str]] = ..., budget: _Optional[int] = ..., mixture: bool = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., retrieval: _Optional[_Union[RetrievalParams, _Mapping]] = ..., neighbors: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., early_exit: bool = ..., session: _Optional[str] = ..., resume_s: _Optional[float] = ..., drafts: _Optional[int] = ..., draft: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class AnswerPrompt(_message.Message):
    __slots__ = ("text", "num_tokens", "passages", "numbers", "left_out")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PASSAGES_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    text: str
    num_tokens: int
    passages: _containers.RepeatedCompositeFieldContainer[Passage]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    left_out: _containers.RepeatedCompositeFieldContainer[Passage]
    def __init__(self, text: _Optional[str] = ..., num_tokens: _Optional[int] = ..., passages: _Optional[_Iterable[_Union[Passage, _Mapping]]] = ..., numbers: _Optional[_Iterable[int]] = ..., left_out: _Optional[_Iterable[_Union[Passage, _Mapping]]] = ...) -> None: ...

class ResumeGenerationRequest(_message.Message):
    __slots__ = ("request_id", "offset")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    offset: int
    def __init__(self, request_id: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class CancelGenerationRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("accepted", "tokens", "finished")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    tokens: Tokens
    finished: Finished
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("request_id", "seed", "store", "k", "lam", "knn_temperature", "prompt", "keyed_share")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    LAM_FIELD_NUMBER: _ClassVar[int]
    KNN_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    KEYED_SHARE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    store: str
    k: int
    lam: float
    knn_temperature: float
    prompt: AnswerPrompt
    keyed_share: float
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., store: _Optional[str] = ..., k: _Optional[int] = ..., lam: _Optional[float] = ..., knn_temperature: _Optional[float] = ..., prompt: _Optional[_Union[AnswerPrompt, _Mapping]] = ..., keyed_share: _Optional[float] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "text", "raw", "logprob", "lm_logprob", "knn_logprob", "lam", "neighbors", "top_logprobs", "passage_shares")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    LM_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    KNN_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    LAM_FIELD_NUMBER: _ClassVar[int]
    NEIGHBORS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PASSAGE_SHARES_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    raw: bytes
    logprob: float
    lm_logprob: float
    knn_logprob: float
    lam: float
    neighbors: _containers.RepeatedCompositeFieldContainer[Neighbor]
    top_logprobs: _containers.RepeatedCompositeFieldContainer[Alternative]
    passage_shares: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., raw: _Optional[bytes] = ..., logprob: _Optional[float] = ..., lm_logprob: _Optional[float] = ..., knn_logprob: _Optional[float] = ..., lam: _Optional[float] = ..., neighbors: _Optional[_Iterable[_Union[Neighbor, _Mapping]]] = ..., top_logprobs: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ..., passage_shares: _Optional[_Iterable[float]] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("token_id", "text", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ..., logprob: _Optional[float] = ...) -> None: ...

class Neighbor(_message.Message):
    __slots__ = ("store", "document_id", "title", "token_offset", "line", "token_id", "token_text", "distance", "weight", "snippet", "char_offset", "metadata")
    STORE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_ID_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXT_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SNIPPET_FIELD_NUMBER: _ClassVar[int]
    CHAR_OFFSET_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    store: str
    document_id: str
    title: str
    token_offset: int
    line: int
    token_id: int
    token_text: str
    distance: float
    weight: float
    snippet: str
    char_offset: int
    metadata: str
    def __init__(self, store: _Optional[str] = ..., document_id: _Optional[str] = ..., title: _Optional[str] = ..., token_offset: _Optional[int] = ..., line: _Optional[int] = ..., token_id: _Optional[int] = ..., token_text: _Optional[str] = ..., distance: _Optional[float] = ..., weight: _Optional[float] = ..., snippet: _Optional[str] = ..., char_offset: _Optional[int] = ..., metadata: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "stop_string", "usage")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_string: str
    usage: Usage
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "generated_tokens", "retrieved_neighbors", "queue_ms", "prefill_ms", "decode_ms", "searches", "retrieval_ms", "lam", "steps", "drafts", "searched_share", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETRIEVED_NEIGHBORS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    SEARCHES_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_MS_FIELD_NUMBER: _ClassVar[int]
    LAM_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    SEARCHED_SHARE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    generated_tokens: int
    retrieved_neighbors: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    searches: int
    retrieval_ms: float
    lam: float
    steps: int
    drafts: _containers.RepeatedCompositeFieldContainer[DraftUsage]
    searched_share: float
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., retrieved_neighbors: _Optional[int] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., searches: _Optional[int] = ..., retrieval_ms: _Optional[float] = ..., lam: _Optional[float] = ..., steps: _Optional[int] = ..., drafts: _Optional[_Iterable[_Union[DraftUsage, _Mapping]]] = ..., searched_share: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class DraftUsage(_message.Message):
    __slots__ = ("source", "drafted", "accepted", "drafts")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    source: str
    drafted: int
    accepted: int
    drafts: int
    def __init__(self, source: _Optional[str] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., drafts: _Optional[int] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("text", "retrieval", "token_scores", "token_ids", "top_logprobs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SCORES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    retrieval: RetrievalParams
    token_scores: bool
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: int
    def __init__(self, text: _Optional[str] = ..., retrieval: _Optional[_Union[RetrievalParams, _Mapping]] = ..., token_scores: bool = ..., token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[int] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("tokens", "words", "bytes", "base", "knn", "store", "k", "lam", "knn_temperature", "token_scores", "searched_share")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    KNN_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    LAM_FIELD_NUMBER: _ClassVar[int]
    KNN_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SCORES_FIELD_NUMBER: _ClassVar[int]
    SEARCHED_SHARE_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    words: int
    bytes: int
    base: Figures
    knn: Figures
    store: str
    k: int
    lam: float
    knn_temperature: float
    token_scores: _containers.RepeatedCompositeFieldContainer[TokenScore]
    searched_share: float
    def __init__(self, tokens: _Optional[int] = ..., words: _Optional[int] = ..., bytes: _Optional[int] = ..., base: _Optional[_Union[Figures, _Mapping]] = ..., knn: _Optional[_Union[Figures, _Mapping]] = ..., store: _Optional[str] = ..., k: _Optional[int] = ..., lam: _Optional[float] = ..., knn_temperature: _Optional[float] = ..., token_scores: _Optional[_Iterable[_Union[TokenScore, _Mapping]]] = ..., searched_share: _Optional[float] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("text", "store", "min_tokens", "spans_per_token", "max_documents", "rank_by", "documents", "where", "as_of")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPANS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MAX_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    RANK_BY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    text: str
    store: str
    min_tokens: int
    spans_per_token: float
    max_documents: int
    rank_by: RankBy
    documents: _containers.RepeatedScalarFieldContainer[str]
    where: _containers.RepeatedScalarFieldContainer[str]
    as_of: str
    def __init__(self, text: _Optional[str] = ..., store: _Optional[str] = ..., min_tokens: _Optional[int] = ..., spans_per_token: _Optional[float] = ..., max_documents: _Optional[int] = ..., rank_by: _Optional[_Union[RankBy, str]] = ..., documents: _Optional[_Iterable[str]] = ..., where: _Optional[_Iterable[str]] = ..., as_of: _Optional[str] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("tokens", "traced_tokens", "spans")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    traced_tokens: int
    spans: _containers.RepeatedCompositeFieldContainer[TracedSpan]
    def __init__(self, tokens: _Optional[int] = ..., traced_tokens: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[TracedSpan, _Mapping]]] = ...) -> None: ...

class TracedSpan(_message.Message):
    __slots__ = ("begin", "end", "tokens", "text", "rarity", "count", "places")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RARITY_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    tokens: int
    text: str
    rarity: float
    count: int
    places: _containers.RepeatedCompositeFieldContainer[Neighbor]
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., tokens: _Optional[int] = ..., text: _Optional[str] = ..., rarity: _Optional[float] = ..., count: _Optional[int] = ..., places: _Optional[_Iterable[_Union[Neighbor, _Mapping]]] = ...) -> None: ...

class Figures(_message.Message):
    __slots__ = ("nll", "token_perplexity", "word_perplexity", "bits_per_byte")
    NLL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_PERPLEXITY_FIELD_NUMBER: _ClassVar[int]
    WORD_PERPLEXITY_FIELD_NUMBER: _ClassVar[int]
    BITS_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    nll: float
    token_perplexity: float
    word_perplexity: float
    bits_per_byte: float
    def __init__(self, nll: _Optional[float] = ..., token_perplexity: _Optional[float] = ..., word_perplexity: _Optional[float] = ..., bits_per_byte: _Optional[float] = ...) -> None: ...

class TokenScore(_message.Message):
    __slots__ = ("id", "text", "logprob", "lm_logprob", "knn_logprob", "top_logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    LM_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    KNN_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    logprob: float
    lm_logprob: float
    knn_logprob: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[Alternative]
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., logprob: _Optional[float] = ..., lm_logprob: _Optional[float] = ..., knn_logprob: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "needs_token", "max_message_bytes", "max_append_bytes", "max_running", "max_queued", "max_queued_tokens", "max_session_bytes", "session_ttl_s", "max_neighbors", "max_top_logprobs", "max_stop_strings", "max_stores", "max_upload_bytes", "max_jobs", "max_sessions", "max_sessions_per_caller", "max_token_ids", "max_upload_documents", "max_unfinished_bytes", "max_streams", "max_caller_calls", "message_timeout_s", "connection_idle_s", "max_cache_bytes", "max_stream_bytes", "max_event_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NEEDS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_APPEND_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSION_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_TTL_S_FIELD_NUMBER: _ClassVar[int]
    MAX_NEIGHBORS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_STORES_FIELD_NUMBER: _ClassVar[int]
    MAX_UPLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_JOBS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_PER_CALLER_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_UPLOAD_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    MAX_UNFINISHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAMS_FIELD_NUMBER: _ClassVar[int]
    MAX_CALLER_CALLS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_IDLE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_EVENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: str
    needs_token: bool
    max_message_bytes: int
    max_append_bytes: int
    max_running: int
    max_queued: int
    max_queued_tokens: int
    max_session_bytes: int
    session_ttl_s: float
    max_neighbors: int
    max_top_logprobs: int
    max_stop_strings: int
    max_stores: int
    max_upload_bytes: int
    max_jobs: int
    max_sessions: int
    max_sessions_per_caller: int
    max_token_ids: int
    max_upload_documents: int
    max_unfinished_bytes: int
    max_streams: int
    max_caller_calls: int
    message_timeout_s: float
    connection_idle_s: float
    max_cache_bytes: int
    max_stream_bytes: int
    max_event_bytes: int
    def __init__(self, version: _Optional[str] = ..., needs_token: bool = ..., max_message_bytes: _Optional[int] = ..., max_append_bytes: _Optional[int] = ..., max_running: _Optional[int] = ..., max_queued: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., max_session_bytes: _Optional[int] = ..., session_ttl_s: _Optional[float] = ..., max_neighbors: _Optional[int] = ..., max_top_logprobs: _Optional[int] = ..., max_stop_strings: _Optional[int] = ..., max_stores: _Optional[int] = ..., max_upload_bytes: _Optional[int] = ..., max_jobs: _Optional[int] = ..., max_sessions: _Optional[int] = ..., max_sessions_per_caller: _Optional[int] = ..., max_token_ids: _Optional[int] = ..., max_upload_documents: _Optional[int] = ..., max_unfinished_bytes: _Optional[int] = ..., max_streams: _Optional[int] = ..., max_caller_calls: _Optional[int] = ..., message_timeout_s: _Optional[float] = ..., connection_idle_s: _Optional[float] = ..., max_cache_bytes: _Optional[int] = ..., max_stream_bytes: _Optional[int] = ..., max_event_bytes: _Optional[int] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "num_parameters", "vocab_size", "context_length", "dim", "num_layers", "dtype", "model_fingerprint", "tokenizer_fingerprint", "device", "adapters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_parameters: int
    vocab_size: int
    context_length: int
    dim: int
    num_layers: int
    dtype: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    device: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., num_parameters: _Optional[int] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., dim: _Optional[int] = ..., num_layers: _Optional[int] = ..., dtype: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., device: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...
