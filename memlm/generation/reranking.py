"""A query and documents -> the documents in the order of their relevance: by a cross-encoder, else by the encoder's
vectors, else by the model.

The model's score is how likely the query is behind the document, a token: the geometric mean of the probabilities
(query likelihood, Ponte and Croft 1998). It ranks far better than its keys (benchmarks/log,
2026-11-29-vectors-of-a-decoder).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float32

from memlm.api.embeddings import RankedDocument, Ranking, RelevanceBy, RerankRequest
from memlm.base.steps import Offload, Steps
from memlm.errors import Corrupt, InvalidInput
from memlm.generation.embedding import check_total, passes, read_texts, together
from memlm.model import Decoder
from memlm.model.files.checkpoint import Checkpoint
from memlm.model.files.cross_encoder_files import CrossEncoder
from memlm.model.files.encoder_files import Encoder, EncoderCheckpoint


def rerank(
    checkpoint: Checkpoint, encoder: Encoder | None, reranker: CrossEncoder | None, request: RerankRequest
) -> Steps[Ranking]:
    """Orders the documents, by the best that is there. Raises InvalidInput, naming the field, for a query without
    room for a document behind it, and for too many tokens.
    """
    if reranker is not None:
        scores_N, num_tokens = yield from _by_cross_encoder(reranker, request)
        by, name = RelevanceBy.CROSS_ENCODER, reranker.name
    elif encoder is not None:
        scores_N, num_tokens = yield from _by_encoder(encoder, request)
        by, name = RelevanceBy.ENCODER, encoder.name
    else:
        scores_N, num_tokens = yield from _by_model(checkpoint, request)
        by, name = RelevanceBy.MODEL, checkpoint.path.name
    if not np.isfinite(scores_N).all():
        raise Corrupt(
            f"a score by {name} is not finite; its weights are damaged, or overflow in their dtype: restore the files,"
            " or load them with another dtype"
        )
    order = np.argsort(-scores_N, kind="stable")[: request.top_n]  # equal ones keep their order
    ranked = tuple(RankedDocument(int(place), float(scores_N[place])) for place in order)
    return Ranking(ranked, by, name, num_tokens)


def _by_cross_encoder(reranker: CrossEncoder, request: RerankRequest) -> Steps[tuple[Float32[np.ndarray, " N"], int]]:
    pairs = yield from read_texts(request.documents, partial(reranker.encode, request.query))
    rows = [ids for ids, _ in pairs]
    num_tokens, scores_N = check_total(rows, "documents"), np.zeros(len(pairs), np.float32)
    for places in together(rows):
        work = partial(reranker.scores, [pairs[place] for place in places])
        scores_N[places] = yield Offload(work, is_long=True)
    return scores_N, num_tokens


def _by_encoder(encoder: Encoder, request: RerankRequest) -> Steps[tuple[Float32[np.ndarray, " N"], int]]:
    loaded: EncoderCheckpoint = yield Offload(lambda: encoder.loaded, is_long=True)
    encode = partial(loaded.tokenizer.encode, most=loaded.max_tokens)
    rows = yield from read_texts((request.query, *request.documents), encode)
    num_tokens, vectors_MD = check_total(rows, "documents"), np.zeros((len(rows), loaded.dim), np.float32)
    for places in together(rows):
        work = partial(loaded.vectors_of_ids, [rows[place] for place in places])
        vectors_MD[places] = yield Offload(work, is_long=True)
    return vectors_MD[1:] @ vectors_MD[0], num_tokens


def _by_model(checkpoint: Checkpoint, request: RerankRequest) -> Steps[tuple[Float32[np.ndarray, " N"], int]]:
    decoder, tokenizer = checkpoint.decoder, checkpoint.tokenizer

    def encode(texts: list[str]) -> list[list[int]]:
        return [tokenizer.encode(text).tolist() for text in texts]

    ((*query,),) = yield from read_texts((request.query,), encode)
    rows = yield from read_texts([f"{document}\n" for document in request.documents], encode)
    most = decoder.config.max_length
    if most is not None:
        if (room := most - 1 - len(query)) < 1:
            raise InvalidInput(
                f"query has {len(query):,} tokens, which leave no room for a document in the {most:,} that"
                f" {checkpoint.path.name} reads; shorten it",
                field="query",
            )
        rows = [row[:room] for row in rows]
    read = [[tokenizer.start_id, *row, *query] for row in rows]
    num_tokens, scores_N = check_total(read, "documents"), np.zeros(len(rows), np.float32)
    yield None  # from here on it needs the model
    for place, ids in enumerate(read):
        scores_N[place] = yield from _mean_logprob(decoder, ids, len(query))
    return np.exp(scores_N), num_tokens


def _mean_logprob(decoder: Decoder, ids: Sequence[int], count: int) -> Steps[float]:
    """The mean log-probability of the last `count` tokens behind those before them, some tokens a step."""
    first, begin, total = len(ids) - count, 0, 0.0
    for hidden_TD, _ in passes(decoder, ids[:-1]):
        known = max(0, first - 1 - begin)  # positions that predict a token before
        if known < len(hidden_TD):
            targets = ids[begin + known + 1 : begin + len(hidden_TD) + 1]
            with torch.inference_mode():
                targets_N1 = torch.tensor(targets, device=decoder.device)[:, None]
                total += float(decoder.logprobs(hidden_TD[known:]).gather(1, targets_N1).sum())
        begin += len(hidden_TD)
        yield None
    return total / count
