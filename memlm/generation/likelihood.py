"""Logits of a text, and the log-probability of a continuation, as evaluation harnesses ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.generation.prompts import too_long
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.gate import gated
from memlm.retrieval.own_past import OwnPast, with_past
from memlm.retrieval.result import RetrievalResult, mix_memory
from memlm.retrieval.retriever import Retriever


def logits_of(checkpoint: Checkpoint, ids: Sequence[int]) -> Float[Tensor, "T V"]:
    """The model's logits after each token, without a datastore. Raises InvalidInput for ids that do not fit."""
    _check(checkpoint, ids)
    decoder = checkpoint.decoder
    with torch.inference_mode():
        hidden_BTD, _ = decoder(torch.tensor([list(ids)]))
        return decoder.logits(hidden_BTD)[0].float()


def keys_of(checkpoint: Checkpoint, ids: Sequence[int]) -> Float32[np.ndarray, "T D"]:
    """The key after each token, by which datastores are searched. Raises InvalidInput for ids that do not fit."""
    _check(checkpoint, ids)
    with torch.inference_mode():
        keys_TD: np.ndarray = checkpoint.decoder.keys(torch.tensor([list(ids)]))[0].float().cpu().numpy()
    return keys_TD


def split_ids(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The tokens of a context, and those that a continuation adds to it: encoded as one text where the context's tokens
    stay as they are, else apart.
    """
    context_ids, whole_ids = (tokenizer.encode(text).tolist() for text in (context, context + continuation))
    if whole_ids[: len(context_ids)] == context_ids and len(whole_ids) > len(context_ids):
        return context_ids, whole_ids[len(context_ids) :]
    return context_ids, tokenizer.encode(continuation).tolist()


def loglikelihood(
    checkpoint: Checkpoint,
    context_ids: Sequence[int],
    new_ids: Sequence[int],
    retriever: Retriever | None,
    past: OwnPast | None = None,
) -> tuple[float, bool]:
    """The log-probability of tokens after others in the mixture, and whether each is the likeliest there. `past` is a
    memory of the text's own positions, which is empty at first.

    Raises InvalidInput for no tokens, and for more than the context takes.
    """
    if not new_ids or not context_ids:
        raise InvalidInput("the continuation is empty; give at least one character", field="continuation")
    read_ids, count, decoder = [*context_ids, *new_ids[:-1]], len(new_ids), checkpoint.decoder
    _check(checkpoint, read_ids)
    with torch.inference_mode():
        hidden_BTD, keys_BTD = decoder(torch.tensor([read_ids]))
        hidden_ND, num_keys = hidden_BTD[0, -count:], count if past is None else len(read_ids)
        lm_logprobs_NV, found = decoder.logprobs(hidden_ND).cpu(), None
        keys_TD = keys_BTD[0, -num_keys:].float().cpu().numpy()
        max_logprobs_N = lm_logprobs_NV.amax(dim=1).numpy()
        if retriever is not None:
            found = retriever.search(keys_TD[-count:], max_logprobs_N)
            if retriever.knn.gate is not None:
                mixed_ND = gated(decoder, retriever.knn.gate, hidden_ND.float(), found.neighbors)
                lm_logprobs_NV = decoder.logprobs(mixed_ND.to(decoder.dtype)).cpu()
        if past is not None:
            past.cache.append(keys_TD, np.array([*read_ids[1:], new_ids[-1]]))
            found = with_past(found, past.search(keys_TD[-count:], max_logprobs_N))
        return mixed_likelihood(lm_logprobs_NV, new_ids, found)


def mixed_likelihood(
    lm_logprobs_NV: Float[Tensor, "N V"], new_ids: Sequence[int], found: RetrievalResult | None
) -> tuple[float, bool]:
    """The log-probability of tokens in the mixture of the model and the neighbors of each, and whether each is the
    likeliest there.
    """
    total, is_greedy = 0.0, True
    for row, token_id in enumerate(new_ids):
        logprobs_V = mix_memory(lm_logprobs_NV[row], found, row).logprobs_V
        total += float(logprobs_V[token_id])
        is_greedy = is_greedy and int(logprobs_V.argmax()) == token_id
    return total, is_greedy


def _check(checkpoint: Checkpoint, ids: Sequence[int]) -> None:
    """Raises InvalidInput for ids outside the vocabulary, and for more than the model reads at once."""
    vocab_size, longest = checkpoint.tokenizer.vocab_size, checkpoint.decoder.config.max_length
    if unknown := [each for each in ids if not 0 <= each < vocab_size][:1]:
        raise InvalidInput(f"token id {unknown[0]} is outside the vocabulary of {vocab_size}", field="token_ids")
    if longest is not None and len(ids) > longest:
        raise too_long(f"{len(ids):,}", longest + 1)
