"""Evidence: a datastore, and as many tokens of passages in the prompt as take its time.

Text is predicted some tokens at a time, from as many tokens before them in each way. A datastore is searched for each
token. Passages are searched for once, and read in front of the text. A time is that of reading the whole prompt and of
these searches, with one thread and one prompt at a time. Loading, tokenizing the prompt and mixing are not counted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.evidence.domains import Prepared, differences, logprobs_of
from benchmarks.evidence.passages import (
    CHUNK,
    CONTEXT,
    NUM_PASSAGES,
    QUERY_TOKENS,
    check_lengths,
    read_windows,
    window_of,
)
from benchmarks.evidence.texts import Domain
from benchmarks.per_token import per_token
from memlm.api.params import RetrievalParams
from memlm.base.cpu import one_core
from memlm.base.progress import Progress
from memlm.bench.machine import seconds
from memlm.data.windows import Window
from memlm.errors import InvalidInput
from memlm.indexing.option_trials import EncodedText
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.encoder import Encoder, Prediction
from memlm.retrieval.retriever import Retriever

ROOMS = (0, 64, 256)  # tokens of passages whose times are measured
FEWEST_TOKENS = 64  # that a passage is taken to have, to find as many as fill the room
TURNS = 12  # prompts that are timed, each in all ways
AT_ONCE, ONE_BY_ONE = "at_once", "one_by_one"  # searches for all tokens of a chunk together, and as generation does
DATASTORES = (AT_ONCE, ONE_BY_ONE)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to predict, and those before them in the document."""

    before: list[int]
    targets: list[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds that one chunk took: to read its prompt with passages of each number of tokens, to search for these
    passages, and to search the datastore in each way.
    """

    read_s: dict[int, float]
    find_s: dict[int, float]
    search_s: dict[str, float]

    def datastore_s(self, way: str) -> float:
        """Seconds of predicting with the datastore."""
        return self.read_s[0] + self.search_s[way]

    def passages_s(self, room: int) -> float:
        """Seconds of predicting with `room` tokens of passages."""
        return self.find_s[room] + self.read_s[room]


def equal_time(checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[dict[str, Any]]:
    """A row for the model alone, for the datastore searched for all tokens of a chunk at once and one by one, for
    passages of several sizes, and for passages that take the time of each datastore: milliseconds a token, the median
    over turns, and nats a token.

    `passage_tokens` of the last ones are interpolated between the sizes that were timed. 0 stands for a datastore that
    is faster than the search for passages. These are timed again beside the datastore: `time_over_datastore` is the
    median of the ratios of their turns. The first 384 tokens of a document are not predicted, and shorter documents are
    left out. The rows of `equal-time-differences` compare two ways.
    """
    with LanguageModel(checkpoint, [prepared.store]) as lm, one_core():
        retriever = lm.engine.stores.retriever(RetrievalParams(context_cache=0))
        assert retriever is not None  # a datastore is loaded
        texts = [lm.tokenize(document.text) for document in prepared.domain.test]
        documents = [chunks for ids in texts if (chunks := list(chunks_of(ids)))]
        queries = iter(queries_of(texts))
        timed = list(itertools.islice(itertools.cycle(_in_turn(documents)), TURNS + 1))
        turns = _timed(lm, retriever, timed, ROOMS, queries, progress)
        rooms = {way: equal_room(turns, way) for way in DATASTORES}
        again = _timed(lm, retriever, timed, sorted({0, *rooms.values()}), queries, progress)
        nats, sizes_D = _nats(lm, retriever, documents, {room for room in rooms.values() if room}, progress)
    name, rows = prepared.domain.name, list[dict[str, Any]]()
    rows.append(_row("alone", 0, [turn.read_s[0] for turn in turns]) | _figures(nats, "alone", sizes_D))
    for way in DATASTORES:
        taken = [turn.datastore_s(way) for turn in turns]
        rows.append(_row(f"datastore {way}", 0, taken) | _figures(nats, "datastore", sizes_D))
    rows += [_row(f"passages of {room}", room, [turn.passages_s(room) for turn in turns]) for room in ROOMS]
    for way, room in rooms.items():
        row = _row(f"passages in the time of {way}", room, [turn.passages_s(room) for turn in again])
        row["time_over_datastore"] = median(turn.passages_s(room) / turn.datastore_s(way) for turn in again)
        rows.append(row | _figures(nats, passages_of(room) if room else "alone", sizes_D))
    pairs = [("datastore", passages_of(room)) for room in dict.fromkeys(rooms.values()) if room]
    rows = [{"text": name, **row} for row in rows]
    return rows + differences("equal-time", name, nats, sizes_D, pairs)


def chunks_of(ids: Sequence[int]) -> Iterator[Chunk]:
    """The chunks of a document that have a whole context before them."""
    for begin in range(CONTEXT, len(ids), CHUNK):
        yield Chunk(list(ids[begin - CONTEXT : begin]), list(ids[begin : begin + CHUNK]))


def queries_of(texts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Different queries for passages, to time the search for them. None ends where a chunk begins, so that no prompt
    has the same one.
    """
    runs = [
        tuple(ids[end - QUERY_TOKENS : end])
        for ids in texts
        for end in range(QUERY_TOKENS + QUERY_TOKENS // 2, len(ids) + 1, QUERY_TOKENS)
    ]
    return list(dict.fromkeys(runs))


def check_equal_time(checkpoint: Checkpoint, domain: Domain) -> None:
    """Raises InvalidInput for a model or documents that are too short for this table, or too few documents."""
    check_lengths(checkpoint, domain, window=max(ROOMS) + CONTEXT + CHUNK, document=CONTEXT + CHUNK)
    there = len(queries_of([checkpoint.tokenizer.encode(each.text).tolist() for each in domain.test]))
    needed = (TURNS + 1) * (len(ROOMS) + 1 + len(DATASTORES))
    if there < needed:
        raise InvalidInput(
            f"the test documents of {domain.name} have {there} different runs of {QUERY_TOKENS} tokens to search for;"
            f" expected {needed} or more, so raise documents or document_tokens",
            field="documents",
        )


def _in_turn(documents: Sequence[Sequence[Chunk]]) -> list[Chunk]:
    """Whole chunks, one of each document after the other."""
    order = [chunk for some in itertools.zip_longest(*documents) for chunk in some if chunk is not None]
    return [chunk for chunk in order if len(chunk.targets) == CHUNK]


def prompt_of(lm: LanguageModel, chunk: Chunk, room: int) -> Window:
    """The window of a chunk behind `room` tokens of passages."""
    found = passage_end(lm, chunk.before, room) if room else []
    return window_of(lm, [*found, *chunk.before], chunk.targets)


def passage_end(lm: LanguageModel, before: Sequence[int], room: int) -> list[int]:
    """The last `room` tokens of the passages that BM25 finds for the end of a text, the best last. The worst is cut."""
    passages = lm.find_passages(lm.detokenize(before[-QUERY_TOKENS:]), k=num_passages(room))
    return [token for each in reversed(passages) for token in lm.tokenize(f"{each.text}\n\n")][-room:]


def num_passages(room: int) -> int:
    """How many passages are found for `room` tokens."""
    return max(NUM_PASSAGES, room // FEWEST_TOKENS)


def _timed(
    lm: LanguageModel,
    retriever: Retriever,
    chunks: Sequence[Chunk],
    rooms: Sequence[int],
    queries: Iterator[Sequence[int]],
    progress: Progress,
) -> list[Turn]:
    """Times each chunk in all ways, one after the other. The first chunk is not counted, since it warms up.

    A search for passages takes a query that was not asked before, because an equal one is faster the second time.
    """
    turns, encoder = list[Turn](), Encoder(lm.checkpoint.decoder)
    for number, chunk in enumerate(chunks):
        find_s = {
            room: seconds(partial(lm.find_passages, lm.detokenize(next(queries)), k=num_passages(room)))
            for room in rooms
        }
        windows = {room: prompt_of(lm, chunk, room) for room in rooms}
        read_s, keys = dict[int, float](), dict[int, Prediction]()
        for room, window in windows.items():
            begin = time.perf_counter()
            (keys[room],) = encoder.predictions([window])
            read_s[room] = time.perf_counter() - begin
        read = EncodedText.of(windows[0], keys[0])
        search_s = {
            AT_ONCE: seconds(partial(retriever.search, read.keys_ND, read.max_logprobs_N)),
            ONE_BY_ONE: seconds(partial(_search_one_by_one, retriever, read)),
        }
        turns.append(Turn(read_s, find_s, search_s))
        progress(f"time {len(rooms)} prompts", number + 1, len(chunks))
    return turns[1:]


def _search_one_by_one(retriever: Retriever, read: EncodedText) -> None:
    for place in range(len(read.targets_N)):
        retriever.search(read.keys_ND[place : place + 1], read.max_logprobs_N[place : place + 1])


def equal_room(turns: Sequence[Turn], way: str) -> int:
    """The number of passage tokens with which a chunk takes as long as with the datastore, by the medians over turns.
    It is interpolated between the sizes that were timed, 0 below all of them, and the largest above.
    """
    wanted = median(turn.datastore_s(way) for turn in turns)
    rooms = sorted(turns[0].read_s)
    times = np.maximum.accumulate([median(turn.passages_s(room) for turn in turns) for room in rooms])
    return int(np.interp(wanted, times, rooms))


def _nats(
    lm: LanguageModel,
    retriever: Retriever,
    documents: Sequence[Sequence[Chunk]],
    rooms: set[int],
    progress: Progress,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Nats of each document alone, with the datastore, and with each number of passage tokens, and its tokens."""
    nats: dict[str, list[float]] = {}
    for number, chunks in enumerate(documents):
        read = read_windows(lm.checkpoint, [prompt_of(lm, chunk, 0) for chunk in chunks])
        ways = {"alone": read.lm_logprobs_N}
        ways["datastore"] = logprobs_of(read, retriever.search(read.keys_ND, read.max_logprobs_N))
        for room in rooms:
            ways[passages_of(room)] = read_windows(
                lm.checkpoint, [prompt_of(lm, chunk, room) for chunk in chunks]
            ).lm_logprobs_N
        for way, logprobs_N in ways.items():
            nats.setdefault(way, []).append(-float(logprobs_N.sum(dtype=np.float64)))
        progress("score", number + 1, len(documents))
    sizes_D = np.array([sum(len(chunk.targets) for chunk in chunks) for chunks in documents], float)
    return {way: np.array(each) for way, each in nats.items()}, sizes_D


def passages_of(room: int) -> str:
    """The name of a way with so many passage tokens."""
    return f"passages of {room}"


def _row(way: str, room: int, taken_s: Sequence[float]) -> dict[str, Any]:
    """Milliseconds a token: the median over turns, with the least and the most."""
    ms = [1000 * each / CHUNK for each in taken_s]
    times = {"ms_per_token": median(ms), "ms_per_token_least": min(ms), "ms_per_token_most": max(ms)}
    return {"way": way, "passage_tokens": room, **times, "ms_per_token_n": len(ms)}


def _figures(nats: dict[str, np.ndarray], way: str, sizes_D: np.ndarray) -> dict[str, float]:
    """Nats a token of one way, and how many fewer than alone, with standard errors over documents."""
    level, level_error = per_token(nats[way], sizes_D)
    less, error = per_token(nats["alone"] - nats[way], sizes_D)
    figures = {"nats_per_token": level, "nats_per_token_error": level_error}
    return {"documents": len(sizes_D), **figures, "nats_less": less, "nats_less_error": error}
