from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from conftest import SHAPE

from memlm.api.params import GenerateRequest
from memlm.base.steps import run_steps
from memlm.data.tokenizer import Tokenizer
from memlm.generation.batch import Batch, RunningSequence
from memlm.generation.generation import Generation
from memlm.generation.prefix_cache import PrefixCache, Scope
from memlm.language_model import LanguageModel
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

GREEDY = {"temperature": 0, "max_tokens": 3, "drafts": 0}
HISTORY = list(range(20, 60))  # tokens, as many as save time
KINDS = {
    "rotary": {},
    "learned": {"positions": "learned"},
    "alibi": {"positions": "alibi"},
    "windows": {"windows": [5, 9]},
    "sinks": {"windows": [6, 6], "num_sinks": 2},
    "extended": {"windows": [6, 6], "num_sinks": 2, "extended_attention": 3},
    "xl": {"positions": "transformer_xl", "xl_length": 12, "context_length": 8},
    "compressive": {
        "positions": "transformer_xl", "xl_length": 8, "context_length": 8,
        "compression": {"kind": "mean", "rate": 2, "length": 4},
    },
    "memorizing": {"memorizing": {"layers": [1], "top_k": 4, "capacity": 40}},
}  # fmt: skip


def checkpoint_of(kind: str, tokenizer: Tokenizer, folder: Path) -> Checkpoint:
    """A model of one of KINDS, whose random weights tell tokens apart."""
    torch.manual_seed(1)
    decoder = Decoder(ModelConfig.from_dict({**SHAPE, "vocab_size": tokenizer.vocab_size, **KINDS[kind]}))
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    save_checkpoint(folder / kind, decoder, tokenizer)
    return load_checkpoint(folder / kind)


def add(batch: Batch, generation: Generation) -> RunningSequence:
    return run_steps(batch.add(generation))


def start(lm: LanguageModel, request: GenerateRequest) -> Generation:
    return run_steps(lm.engine.start(request))


class NumRead:
    """How many tokens a decoder reads within a block."""

    def __init__(self, decoder: Decoder) -> None:
        self.count, self._decoder = 0, decoder

    def __enter__(self) -> "NumRead":
        def seen(_: object, arguments: Sequence[torch.Tensor], options: dict) -> None:
            self.count += sum(options.get("new_B") or [arguments[0].shape[1]] * len(arguments[0]))

        self._hook = self._decoder.register_forward_pre_hook(seen, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def started(checkpoint: Checkpoint, ids: Sequence[int], *, caller: str = "", **options) -> Generation:
    request = GenerateRequest.of(ids, {**GREEDY, **options})
    generation = run_steps(Generation.start(checkpoint, request, None))
    generation.caller = caller
    return generation


def state_of(checkpoint: Checkpoint, ids: Sequence[int]):
    state = checkpoint.decoder.new_state(capacity=len(ids))
    with torch.inference_mode():
        checkpoint.decoder(torch.tensor([[*ids]]), state)
    return state


def keep(prefixes: PrefixCache, checkpoint: Checkpoint, ids: Sequence[int], caller: str = "") -> None:
    prefixes.keep(Scope(caller, 0), np.array(ids, np.int32), state_of(checkpoint, ids), 0)


def length_found(prefixes: PrefixCache, ids: Sequence[int], caller: str = "") -> int:
    found = prefixes.find(Scope(caller, 0), np.array(ids, np.int32))
    return 0 if found is None else found.length
