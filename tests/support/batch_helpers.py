from memlm.api.params import GenerateRequest
from memlm.base.steps import run_steps
from memlm.generation.batch import Batch, RunningSequence
from memlm.generation.generation import Generation
from memlm.language_model import LanguageModel

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


def add(batch: Batch, generation: Generation) -> RunningSequence:
    return run_steps(batch.add(generation))


def start(lm: LanguageModel, request: GenerateRequest) -> Generation:
    return run_steps(lm.engine.start(request))
