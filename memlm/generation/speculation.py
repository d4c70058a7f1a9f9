"""Speculative retrieval (RaLMSpec, arXiv 2401.14021): one slow search for the keys of several tokens.

The model reads on before a search, one token a pass, with neighbors that are near at hand. These tokens are a draft of
which each key is known when the search comes, so one search confirms them or finds the first wrong one. The confirmed
tokens were read once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from memlm.generation.draft_budget import PassCost
from memlm.generation.step_search import Decoded, remember, search_memories
from memlm.model import Decoder, DecoderState, decoding_threads


def read_on(
    decoder: Decoder, state: DecoderState, decoded: Sequence[Decoded], length: int, cost: PassCost
) -> list[Decoded]:
    """Guesses and reads up to `length` tokens of the sequences that are in a run, within `DecoderState.run`.

    `decoded` has the last token of each row of the state, and of rows without a run also the draft. Those in a run come
    back with all tokens that were read. `cost` learns the time of the passes.
    """
    parts = {row: [each] for row, each in enumerate(decoded) if each.sequence.generation.is_in_run}
    going = [row for row in parts if decoded[row].sequence.failure is None]
    for _ in range(length):
        begin_s = time.perf_counter()
        guessed = _guess(decoder, {row: parts[row] for row in going})
        going = list(guessed)
        if not going:
            break
        new_B = [int(row in guessed) for row in range(len(decoded))]
        ids_B1 = torch.tensor([[guessed.get(row, 0)] for row in range(len(decoded))])
        with decoding_threads(decoder, len(going)):
            hidden_B1D, keys_B1D = decoder(ids_B1, state, new_B=new_B)
        for row in going:
            last = parts[row][-1]
            remember(last.sequence, [guessed[row]], keys_B1D[row])
            parts[row].append(Decoded(last.sequence, hidden_B1D[row], keys_B1D[row], first=last.first + 1))
        cost.add(len(going), time.perf_counter() - begin_s)
    return [_joined(parts[row]) if row in parts else each for row, each in enumerate(decoded)]


def _guess(decoder: Decoder, parts: dict[int, list[Decoded]]) -> dict[int, int]:
    """The next token of each row, none for a text that ends or whose guess fails. Notes their log-probabilities."""
    if not parts:
        return {}
    with decoding_threads(decoder, len(parts)):
        logprobs_RV = decoder.logprobs(torch.cat([each[-1].hidden_ND for each in parts.values()])).cpu()
        for each, logprobs_V in zip(parts.values(), logprobs_RV, strict=True):
            each[-1] = each[-1]._replace(known_MV=logprobs_V[None])
        found = search_memories(decoder, [each[-1] for each in parts.values()], guesses=True)
    guessed = dict[int, int]()
    rows = zip(parts.items(), found.logprobs_RV, found.results, found.pasts, strict=True)
    for (row, each), logprobs_V, results, past in rows:
        generation, failure = (sequence := each[-1].sequence).generation, sequence.failure
        try:
            if failure is not None:  # of the guess: the search may do without what failed here
                sequence.failure = None
                raise failure
            token_id = generation.guess(logprobs_V, results[0], past)
        except Exception as error:
            generation.stop_guessing(error)
        else:
            if token_id is not None:
                guessed[row] = token_id
    return guessed


def _joined(parts: Sequence[Decoded]) -> Decoded:
    """All positions of a run."""
    known = [part.known_MV for part in parts if part.known_MV is not None]
    hidden_ND, keys_ND = torch.cat([part.hidden_ND for part in parts]), torch.cat([part.keys_ND for part in parts])
    return parts[0]._replace(hidden_ND=hidden_ND, keys_ND=keys_ND, known_MV=_cat(known))


def _cat(known: Sequence[Tensor]) -> Tensor | None:
    return torch.cat(list(known)) if known else None
