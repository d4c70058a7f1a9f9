"""Answers of an encoder-decoder to source texts: `Seq2Seq.load(folder).generate("summarize: ...")`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from memlm.api.generation import FinishReason
from memlm.api.params import MAX_SEED, SamplingParams
from memlm.api.prompts import is_batch, token_ids_of
from memlm.errors import InvalidInput
from memlm.generation.sampling import sample
from memlm.model.files.encoder_files import padded
from memlm.zoo.shapes.encoder_decoder_files import Seq2SeqCheckpoint, load_encoder_decoder

ROWS_AT_ONCE = 16  # sources that are answered side by side
OPTIONS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@dataclass(frozen=True, slots=True)
class Seq2SeqOutput:
    """The answer to one source. `str` of it is its text.

    `token_ids` and their natural log-probabilities are those of the whole answer, the token that ends it included.
    `reason` is END or LENGTH.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: FinishReason
    seed: int

    def __str__(self) -> str:
        return self.text


class Seq2Seq:
    """An encoder-decoder, T5 or mT5, with its tokenizer. For one thread at a time.

    It answers sources in process. Datastores, sessions, drafts, adapters and the server need a decoder (`memlm.load`).
    """

    def __init__(self, checkpoint: Seq2SeqCheckpoint) -> None:
        self.checkpoint = checkpoint

    @classmethod
    def load(
        cls, model: str | Path, *, dtype: str = "auto", device: str = "auto", context_length: int | None = None
    ) -> Seq2Seq:
        """Loads a model, by its folder in the Hugging Face layout or its id on the hub.

        `context_length` is the longest source and the longest answer in tokens (default: the config's, else 512).
        `dtype` and `device` are those of `memlm.load`. Raises NotFound where a folder is missing, Incompatible for a
        model of another kind, Corrupt for a damaged file.
        """
        return cls(load_encoder_decoder(model, dtype=dtype, device=device, context_length=context_length))

    def __repr__(self) -> str:
        model = self.checkpoint.model
        return f"<Seq2Seq {self.checkpoint.path.name}: {model.num_parameters:,} parameters, {model.dtype_name}>"

    @overload
    def generate(self, source: str | Sequence[int], **options: Any) -> Seq2SeqOutput: ...

    @overload
    def generate(
        self, source: Sequence[str] | Sequence[Sequence[int]], **options: Any
    ) -> tuple[Seq2SeqOutput, ...]: ...

    def generate(
        self, source: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]], **options: Any
    ) -> Seq2SeqOutput | tuple[Seq2SeqOutput, ...]:
        """Answers a source, a text or token ids, or each of a list of them.

        A text is read in the tokenizer's template, and special tokens that are written out in it are ordinary text. Ids
        are read as they are, so that they may hold the sentinels of span corruption (`sentinel_id`). The options are
        `max_tokens` (default: all that fit), `temperature` (default 0: the likeliest token), `top_k`, `top_p`, `min_p`,
        `repetition_penalty` and `seed`. The penalty counts the tokens of the answer. Equal seeds give equal answers.
        Raises InvalidInput for a source that does not fit, for a value out of range, and for other options.
        """
        params = _params(options)
        sources: Sequence[Any] = list(source) if is_batch(source) else [source]
        rows = [self._ids(each) for each in sources]
        outputs = list[Seq2SeqOutput]()
        for begin in range(0, len(rows), ROWS_AT_ONCE):
            outputs += self._answer(rows[begin : begin + ROWS_AT_ONCE], params)
        return tuple(outputs) if is_batch(source) else outputs[0]

    def sentinel_id(self, number: int) -> int:
        """Returns the token that stands for the span of some number, `<extra_id_0>` for the first.

        Raises InvalidInput where the tokenizer has none.
        """
        return self.checkpoint.tokenizer.id_of(f"<extra_id_{number}>")

    def _ids(self, source: Any) -> list[int]:
        tokenizer, vocab_size = self.checkpoint.tokenizer, self.checkpoint.model.config.vocab_size
        if isinstance(source, str):
            return tokenizer.encode([source])[0]
        ids = token_ids_of("source", source)
        if not all(0 <= each < vocab_size for each in ids):
            raise InvalidInput(
                f"source has ids outside 0 to {vocab_size - 1}; give ids of its tokenizer", field="source"
            )
        return list(ids)

    @torch.inference_mode()
    def _answer(self, sources: Sequence[Sequence[int]], params: SamplingParams) -> list[Seq2SeqOutput]:
        model, ends, room = self.checkpoint.model, self.checkpoint.end_ids, self.checkpoint.model.config.context_length
        most = room if params.max_tokens is None else params.max_tokens
        if most > room:
            raise InvalidInput(
                f"max_tokens is {most}; at most {room} fit, unless the model is loaded with a greater context_length",
                field="max_tokens",
            )
        seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        answers = [_Answer(np.random.default_rng(seed)) for _ in sources]
        state = model.new_state(batch_size=len(sources), capacity=most, sources_B=model.encode(*padded(sources)))
        next_ids = [self.checkpoint.start_id] * len(sources)
        for _ in range(most):
            new_B = [0 if answer.is_ended(ends) else 1 for answer in answers]
            if not any(new_B):
                break
            hidden_BTD, _ = model(torch.tensor(next_ids)[:, None], state, new_B=new_B)
            logprobs_BV = model.logprobs(hidden_BTD[:, 0]).cpu()
            for row, answer in enumerate(answers):
                if new_B[row]:
                    next_ids[row] = answer.add(logprobs_BV[row], params)
        return [self._output(answer, seed) for answer in answers]

    def _output(self, answer: _Answer, seed: int) -> Seq2SeqOutput:
        is_ended = answer.is_ended(self.checkpoint.end_ids)
        text = self.checkpoint.tokenizer.decode(answer.ids)
        reason = FinishReason.END if is_ended else FinishReason.LENGTH
        return Seq2SeqOutput(text, tuple(answer.ids), tuple(answer.logprobs), reason, seed)


@dataclass(slots=True)
class _Answer:
    """The answer of a row so far."""

    generator: np.random.Generator
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def is_ended(self, end_ids: Sequence[int]) -> bool:
        return bool(self.ids) and self.ids[-1] in end_ids

    def add(self, logprobs_V: Float[Tensor, " V"], params: SamplingParams) -> int:
        """Samples the next token, and returns it."""
        self.ids.append(sample(logprobs_V, params, self.ids, self.generator))
        self.logprobs.append(float(logprobs_V[self.ids[-1]]))
        return self.ids[-1]


def _params(options: dict[str, Any]) -> SamplingParams:
    for name in options:
        if name not in OPTIONS:
            raise InvalidInput(
                f"an encoder-decoder has no option {name!r}; its options are {', '.join(OPTIONS)}. Datastores,"
                " sessions, drafts and adapters need a decoder, which memlm.load reads",
                field=name,
            )
    return SamplingParams(**{"temperature": 0.0, **options})
