"""Several prompts, continued side by side: the weights are read once a step for all of them.

Each text is what it would be alone, with its own seed and its own memory, up to the last bits of floating point: the
products of a batch add in another order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from memlm.api import Completion, Token
from memlm.checkpoint import Checkpoint
from memlm.gate import gated
from memlm.generate import Generation
from memlm.model import decoding_threads
from memlm.retrieval import Retrieval


def complete_all(
    checkpoint: Checkpoint, generations: Sequence[Generation], retrieval: Retrieval | None
) -> tuple[Completion, ...]:
    """Drives all generations to their ends; they share what is retrieved from, and one search a step."""
    decoder = checkpoint.decoder
    places = max(generation.num_places for generation in generations)
    state = decoder.new_state(batch_size=len(generations), capacity=places)
    told: list[list[Token]] = [[] for _ in generations]
    while running := [row for row, generation in enumerate(generations) if generation.finished is None]:
        begin = time.perf_counter()
        new_B = [len(each.unread) if each.finished is None else 0 for each in generations]
        tokens_BT = torch.zeros(len(generations), max(new_B), dtype=torch.int64)
        for row in running:
            tokens_BT[row, : new_B[row]] = torch.tensor(generations[row].unread)
        with torch.inference_mode(), decoding_threads(decoder, tokens_BT.numel()):
            hidden_BTD, keys_BTD = decoder(tokens_BT, state, new_B=new_B)
            last_R = torch.tensor([new_B[row] - 1 for row in running])
            rows_R = torch.tensor(running)
            hidden_RD = hidden_BTD[rows_R, last_R]
            keys_RD = keys_BTD[rows_R, last_R].float().numpy()
            asks = retrieval is not None and generations[running[0]].wants_memory
            logprobs_RV = decoder.logprobs(hidden_RD)
            peaks_R = logprobs_RV.amax(dim=1).numpy()
            pointers = [generations[row].pointers for row in running]
            found = retrieval.search(keys_RD, peaks_R, pointers) if retrieval is not None and asks else None
            if found is not None and retrieval is not None and retrieval.gate:
                logprobs_RV = decoder.logprobs(gated(decoder, retrieval.gate, hidden_RD, found.neighbours))
            for number, row in enumerate(running):
                one = None if found is None else found.row(number)
                told[row] += generations[row].draw(logprobs_RV[number], one, begin)
    return tuple(
        Completion("".join(token.text for token in tokens), tuple(tokens), generation.accepted, generation.finished)
        for tokens, generation in zip(told, generations, strict=True)
        if generation.finished is not None
    )
