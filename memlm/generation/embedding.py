"""Texts -> vectors: of the encoder, or of the model's keys where there is none.

All texts become tokens first, so that a request that is too large costs no pass of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from memlm.api.embeddings import MAX_NUMBERS, Embeddings, EmbedRequest, check_num_tokens
from memlm.base.steps import Offload, Steps
from memlm.errors import Corrupt, InvalidInput
from memlm.model import Decoder
from memlm.model.files.checkpoint import Checkpoint
from memlm.model.files.encoder_files import Encoder, EncoderCheckpoint
from memlm.retrieval.encoder import PIECE_TOKENS

AT_ONCE_CHARACTERS = 1 << 16  # of texts that become tokens in one piece of work
AT_ONCE_TOKENS = 1024  # of texts that an encoder reads in one piece of work, or those of one text

T = TypeVar("T")


def embed(checkpoint: Checkpoint, encoder: Encoder | None, request: EmbedRequest) -> Steps[Embeddings]:
    """Makes a vector of each text: by the encoder, outside the loop, or by the model, some tokens of one text a step.

    Raises InvalidInput, naming the field, for a text that is too long, for ids that are no tokens, for more dimensions
    than there are, and for too many tokens.
    """
    if encoder is None:
        return (yield from _embed_by_model(checkpoint, request))
    loaded: EncoderCheckpoint = yield Offload(lambda: encoder.loaded, is_long=True)
    _check_size(request, loaded.dim, loaded.name)
    if request.texts:
        most = None if not request.truncate else loaded.max_tokens
        rows = yield from read_texts(request.texts, lambda texts: loaded.tokenizer.encode(texts, most=most))
    else:
        rows = _ids_of(request, loaded.tokenizer.vocab_size, loaded.max_tokens)
    _check_lengths(rows, loaded.max_tokens, loaded.name)
    num_tokens = check_total(rows, "texts")
    vectors_ND = np.zeros((len(rows), loaded.dim), np.float32)
    for places in together(rows):
        work = partial(loaded.vectors_of_ids, [rows[place] for place in places])
        vectors_ND[places] = yield Offload(work, is_long=True)
    return _embeddings(vectors_ND, request.dimensions, loaded.name, num_tokens)


def _embed_by_model(checkpoint: Checkpoint, request: EmbedRequest) -> Steps[Embeddings]:
    """The mean of a text's keys, without that of the start token, which is large and much the same for all texts
    (benchmarks/log, 2026-11-29-vectors-of-a-decoder).
    """
    decoder, tokenizer, name = checkpoint.decoder, checkpoint.tokenizer, checkpoint.path.name
    _check_size(request, decoder.config.dim, name)
    most = decoder.config.max_length
    room = None if most is None else most - 1  # behind the start token
    if request.texts:
        rows = yield from read_texts(request.texts, lambda texts: [tokenizer.encode(text).tolist() for text in texts])
        rows = [row[:room] for row in rows] if request.truncate else rows
    else:
        rows = _ids_of(request, tokenizer.vocab_size, room)
        rows = [row[1:] if row[0] == tokenizer.start_id and len(row) > 1 else row for row in rows]
    _check_lengths(rows, room, name)
    num_tokens = check_total(rows, "texts")
    vectors_ND = np.zeros((len(rows), decoder.config.dim), np.float32)
    yield None  # from here on it needs the model
    for place, row in enumerate(rows):
        num_skipped = 1
        for _, keys_TD in passes(decoder, [tokenizer.start_id, *row]):
            vectors_ND[place] += keys_TD[num_skipped:].float().sum(dim=0).cpu().numpy()
            num_skipped = 0
            yield None
    return _embeddings(_unit(vectors_ND), request.dimensions, name, num_tokens)


def passes(decoder: Decoder, ids: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Reads one text. Yields hidden states and keys (T, D) of a bounded number of tokens, one piece after the other."""
    state = decoder.new_state(capacity=len(ids))
    for begin in range(0, len(ids), PIECE_TOKENS):
        with torch.inference_mode():
            hidden_BTD, keys_BTD = decoder(torch.tensor([ids[begin : begin + PIECE_TOKENS]]), state)
        yield hidden_BTD[0], keys_BTD[0]


def read_texts(texts: Sequence[str], encode: Callable[[list[str]], list[T]]) -> Steps[list[T]]:
    """Encodes texts outside the loop, a bounded number of characters at once."""
    rows = list[T]()
    for places in together(texts, AT_ONCE_CHARACTERS):
        rows += yield Offload(partial(encode, [texts[place] for place in places]), is_long=True)
    return rows


def together(rows: Sequence[Sequence[object]], most: int = AT_ONCE_TOKENS) -> Iterator[list[int]]:
    """Yields the places of neighboring rows that have `most` items together, or of one that is longer."""
    places, size = list[int](), 0
    for place, row in enumerate(rows):
        if places and size + len(row) > most:
            yield places
            places, size = [], 0
        places.append(place)
        size += len(row)
    if places:
        yield places


def check_total(rows: Sequence[Sequence[int]], field: str) -> int:
    """Counts the tokens. Raises InvalidInput for more than MAX_READ_TOKENS."""
    total = sum(map(len, rows))
    check_num_tokens(field, total)
    return total


def _ids_of(request: EmbedRequest, vocab_size: int, most: int | None) -> list[list[int]]:
    """The texts that came as token ids. Raises InvalidInput for an id outside the vocabulary."""
    for each in request.token_ids:
        if min(each.ids) < 0 or max(each.ids) >= vocab_size:
            unknown = next(number for number in each.ids if not 0 <= number < vocab_size)
            raise InvalidInput(
                f"token_ids has the id {unknown}, outside the vocabulary of {vocab_size:,}; the ids are those of this"
                " server's encoder, or of its model where there is none: send texts",
                field="token_ids",
            )
    return [[*each.ids[: most if request.truncate else None]] for each in request.token_ids]


def _check_lengths(rows: Sequence[Sequence[int]], most: int | None, name: str) -> None:
    for place, row in enumerate(rows):
        if most is not None and len(row) > most:
            raise InvalidInput(
                f"text {place} has {len(row):,} tokens, and {name} reads {most:,}; split it, or set truncate to read"
                " its begin",
                field="texts",
            )


def _check_size(request: EmbedRequest, dim: int, name: str) -> None:
    """Raises InvalidInput for more dimensions than vectors have, and for too large an answer."""
    if request.dimensions is not None and request.dimensions > dim:
        raise InvalidInput(
            f"dimensions is {request.dimensions:,}; the vectors of {name} have {dim:,}: ask for fewer, or leave it out",
            field="dimensions",
        )
    count = len(request.texts) + len(request.token_ids)
    if count * (request.dimensions or dim) > MAX_NUMBERS:
        raise InvalidInput(
            f"{count:,} vectors of {request.dimensions or dim:,} numbers are more than the {MAX_NUMBERS:,} of an"
            " answer; send the texts in several calls",
            field="texts",
        )


def _embeddings(
    vectors_ND: Float32[np.ndarray, "N D"], dimensions: int | None, name: str, num_tokens: int
) -> Embeddings:
    """The answer, of vectors of length 1."""
    if not (finite_N := np.isfinite(vectors_ND).all(axis=1)).all():
        raise Corrupt(
            f"the vector of text {int(np.argmin(finite_N))} by {name} is not finite; its weights are damaged, or"
            " overflow in their dtype: restore the files, or load them with another dtype"
        )
    is_whole = dimensions in (None, vectors_ND.shape[1])
    vectors_Nd = vectors_ND if is_whole else _unit(vectors_ND[:, :dimensions])
    return Embeddings(vectors_Nd.astype("<f4").tobytes(), vectors_Nd.shape[1], name, num_tokens)


def _unit(vectors_ND: Float32[np.ndarray, "N D"]) -> Float32[np.ndarray, "N D"]:
    lengths_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    return vectors_ND / np.maximum(lengths_N1, np.finfo(np.float32).tiny)
