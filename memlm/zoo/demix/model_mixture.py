"""Several models of one tokenizer -> one text, from the mixture of their distributions (DEMix, arXiv 2108.05036, and
Branch-Train-Merge, 2208.03306).

p(x_t | x_<t) = sum over d of p(d | x_<t) p_d(x_t | x_<t), where the weight of model d follows Bayes' rule from all
tokens so far: p(d | x_<t) is proportional to p(d) times the probability that the model gave to x_<t. The published code
multiplies the prior by the probability of the previous token alone.

A model with experts of domains (`memlm.zoo.demix.domains`) counts once for each of its domains.

Shapes: D models, or domains of models, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple, Unpack

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from memlm.api.generation import GenerationEvent
from memlm.api.handles import TokenStream
from memlm.api.options import GenerateOptions
from memlm.api.params import GenerateRequest, RetrievalParams
from memlm.base.lists import check_list, items_of
from memlm.base.steps import run_steps
from memlm.errors import Incompatible, InvalidInput, check_range
from memlm.generation.generation import Generation
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.model.state.decoder_state import DecoderState
from memlm.zoo.demix.domains import domains_of, number_of, set_domains

PIECE_TOKENS = 64  # whose distributions of all models are held at once
OF_PRIOR = 0.3  # of a text's posterior in the moving mean of priors (DEMix, section 5.1)
OWN_DATA = ("session", "adapter", "early_exit")  # options that belong to one model
OF_STORES = ("neighbors", "drafts", "draft")  # options for datastores and drafts, beside `retrieval`


class Reader(NamedTuple):
    """A model, or one domain of a model."""

    checkpoint: Checkpoint
    domain: str | None = None

    @classmethod
    def all_of(cls, checkpoint: Checkpoint) -> list[Reader]:
        """The domains of a model, or the model."""
        return [cls(checkpoint, name) for name in domains_of(checkpoint.decoder.config)] or [cls(checkpoint)]

    def new_state(self, capacity: int) -> DecoderState:
        """Returns an empty state of one row."""
        state = self.checkpoint.decoder.new_state(capacity=capacity)
        if self.domain is not None:
            set_domains(state, [number_of(self.checkpoint.decoder.config, self.domain)])
        return state


class MixedText:
    """One text that D models read, and the posterior over them. Tokens after the first change it."""

    def __init__(self, readers: Sequence[Reader], prior: Sequence[float], *, top: int, capacity: int) -> None:
        self._decoders, self._top = [each.checkpoint.decoder for each in readers], top
        self._states = [each.new_state(capacity) for each in readers]
        self._logweights_D = torch.tensor(prior, dtype=torch.float64).log().log_softmax(dim=0)
        self._last_DV: Float64[Tensor, "D V"] | None = None

    @property
    def posterior(self) -> tuple[float, ...]:
        """p(d | text so far), which sums to 1."""
        return tuple(self._logweights_D.exp().tolist())

    def read(self, token_ids: Sequence[int]) -> Float[Tensor, " V"]:
        """Reads tokens. Returns the log-probabilities of the next one in the mixture."""
        mixed_V = torch.empty(0)
        for begin in range(0, len(token_ids), PIECE_TOKENS):
            mixed_V = self._read_piece(token_ids[begin : begin + PIECE_TOKENS])[-1]
        return mixed_V

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Reads tokens. Returns the log-probability in the mixture of each but the first."""
        found = list[float]()
        for begin in range(0, len(token_ids), PIECE_TOKENS):
            piece = token_ids[begin : begin + PIECE_TOKENS]
            following = token_ids[begin + 1 : begin + PIECE_TOKENS + 1]
            mixed_TV = self._read_piece(piece)[: len(following)]
            found += mixed_TV[torch.arange(len(following)), torch.tensor(following, dtype=torch.int64)].tolist()
        return found

    @torch.inference_mode()
    def _read_piece(self, token_ids: Sequence[int]) -> Float[Tensor, "T V"]:
        tokens_T = torch.tensor(token_ids)
        logprobs_DTV = torch.stack(
            [
                decoder.logprobs(decoder(tokens_T[None], state)[0][0]).double().cpu()
                for decoder, state in zip(self._decoders, self._states, strict=True)
            ]
        )
        D, T, V = logprobs_DTV.shape
        before_DV = torch.zeros(D, V, dtype=torch.float64) if self._last_DV is None else self._last_DV
        expected_DTV = torch.cat([before_DV[:, None], logprobs_DTV[:, :-1]], dim=1)
        gained_DT = expected_DTV[:, torch.arange(T), tokens_T]
        logweights_DT = (self._logweights_D[:, None] + gained_DT.cumsum(dim=1)).log_softmax(dim=0)
        self._logweights_D, self._last_DV = logweights_DT[:, -1], logprobs_DTV[:, -1]
        return (best_of(logweights_DT, self._top)[..., None] + logprobs_DTV).logsumexp(dim=0).float()


def best_of(logweights_DT: Float64[Tensor, "D T"], top: int) -> Float64[Tensor, "D T"]:
    """Returns the weights of the `top` best models of each token, which sum to 1, and -inf for the others. Of models
    that are equally good, the first ones are the best.
    """
    if not top or top >= len(logweights_DT):
        return logweights_DT
    best_nT = logweights_DT.argsort(dim=0, descending=True, stable=True)[:top]
    kept_DT = torch.full_like(logweights_DT, -math.inf).scatter(0, best_nT, logweights_DT.gather(0, best_nT))
    return kept_DT.log_softmax(dim=0)


class ModelMixture:
    """Models of one tokenizer, by their folders, as one model. For one thread at a time.

    `prior` are p(d) up to a factor, uniform by default. `learn_prior` takes it from held-out texts, and with `updates`
    each text that is generated or scored to its end changes it and `posterior`. A stream that is closed early changes
    neither. `top` models of the greatest posterior predict a token, 0 for all. Raises Incompatible for models of other
    tokenizers or sizes of vocabulary, InvalidInput for weights that do not fit the models, and as `memlm.load` does.
    """

    def __init__(
        self,
        models: Sequence[str | Path | Checkpoint],
        *,
        prior: Sequence[float] = (),
        top: int = 0,
        updates: bool = False,
        dtype: str = "auto",
        device: str = "auto",
    ) -> None:
        self.checkpoints = [
            model if isinstance(model, Checkpoint) else load_checkpoint(model, dtype=dtype, device=device)
            for model in items_of("models", models, str | Path | Checkpoint, expected="models")
        ]
        if not self.checkpoints:
            raise InvalidInput("a mixture has no models; give one at least", field="models")
        first = self.checkpoints[0]
        for other in self.checkpoints[1:]:
            if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
                raise Incompatible(
                    f"{other.path} has another tokenizer than {first.path}; train it with --init-from {first.path}"
                )
            sizes = [each.decoder.config.vocab_size for each in (other, first)]
            if sizes[0] != sizes[1]:
                raise Incompatible(
                    f"{other.path} predicts {sizes[0]:,} tokens and {first.path} {sizes[1]:,}; expected as many: train"
                    f" it with --init-from {first.path}"
                )
        self.readers = [reader for each in self.checkpoints for reader in Reader.all_of(each)]
        check_range("top", top, least=0, most=len(self.readers), whole=True)
        prior = tuple(prior) or (1.0,) * len(self.readers)
        if len(prior) != len(self.readers) or not all(0 < weight < math.inf for weight in prior):
            raise InvalidInput(
                f"the prior is {list(prior)} for {len(self.readers)} models or domains; give each a weight above 0",
                field="prior",
            )
        self.prior, self.top, self.updates = tuple(weight / sum(prior) for weight in prior), top, updates
        self.posterior = self.prior  # after the latest text

    def generate(
        self, prompt: str | Sequence[int] | GenerateRequest = "", **options: Unpack[GenerateOptions]
    ) -> TokenStream:
        """Continues a prompt token by token, with the options of `LanguageModel.generate` but those of one model:
        sessions, adapters, early exit, drafts and datastores. The prompt counts in the posterior. Raises InvalidInput
        for these options.
        """
        request = GenerateRequest.of(prompt, options)
        for name in OWN_DATA:
            if getattr(request, name):
                raise InvalidInput(f"{name} belongs to one model; leave it out of a mixture", field=name)
        _refuse_stores(request)
        return TokenStream.begin(self._stream(replace(request, drafts=0, draft="")))

    def score(self, text: str) -> float:
        """Returns the nats per token of a text that fits the models' context. Raises InvalidInput for an empty one."""
        tokenizer = self.checkpoints[0].tokenizer
        ids = [tokenizer.start_id, *tokenizer.encode(text).tolist()]
        if len(ids) == 1:
            raise InvalidInput("the text is empty; give one with a token", field="text")
        mixed = self._new_text(len(ids))
        logprobs = mixed.logprobs(ids)
        self._end(mixed)
        return -sum(logprobs) / len(logprobs)

    def learn_prior(self, texts: Iterable[str]) -> tuple[float, ...]:
        """Moves the prior by the posterior after each text, and returns it: the cached prior of DEMix."""
        check_list("texts", texts)
        for text in texts:
            self.score(text)
            if not self.updates:
                self.prior = moved(self.prior, self.posterior)
        return self.prior

    def _new_text(self, capacity: int) -> MixedText:
        return MixedText(self.readers, self.prior, top=self.top, capacity=capacity)

    def _end(self, text: MixedText) -> None:
        self.posterior = text.posterior
        if self.updates:
            self.prior = moved(self.prior, self.posterior)

    def _stream(self, request: GenerateRequest) -> Generator[GenerationEvent, None, None]:
        leader = run_steps(Generation.start(self.checkpoints[0], request, None))
        try:
            text = self._new_text(leader.max_positions)
            yield leader.accepted
            while leader.finished is None:
                begin_s = time.perf_counter()
                mixed_V = text.read(leader.pending_ids)
                with torch.inference_mode():
                    tokens, _ = leader.sample_draft(mixed_V[None], [None], begin_s)
                if tokens:
                    yield tokens
            self._end(text)
            yield leader.finished
        finally:
            leader.close()


def _refuse_stores(request: GenerateRequest) -> None:
    """Raises InvalidInput for options that would have no effect, as a mixture has no datastores and no drafts."""
    plain = RetrievalParams(use_store=request.retrieval.use_store)
    names = (each.name for each in fields(plain))
    given = [name for name in names if getattr(request.retrieval, name) != getattr(plain, name)]
    given += [name for name in OF_STORES if getattr(request, name)]
    if given:
        raise InvalidInput(
            f"{given[0]} is given, and a mixture of models has neither datastores nor drafts; leave it out",
            field=given[0],
        )


def moved(prior: Sequence[float], posterior: Sequence[float]) -> tuple[float, ...]:
    """Returns the moving mean of priors after a text."""
    return tuple((1 - OF_PRIOR) * p + OF_PRIOR * q for p, q in zip(prior, posterior, strict=True))
