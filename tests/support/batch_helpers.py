from pathlib import Path

import torch
from conftest import SHAPE

from memlm.api.params import GenerateRequest
from memlm.base.steps import run_steps
from memlm.data.tokenizer import Tokenizer
from memlm.generation.batch import Batch, RunningSequence
from memlm.generation.generation import Generation
from memlm.language_model import LanguageModel
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

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
