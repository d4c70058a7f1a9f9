"""Held-out text -> the confidence at which a layer's output needs no further layers (arXiv 2207.07061, section 4).

Calibration tests thresholds from the strictest down: do greedy texts differ from the whole model's in at most `delta`
of their tokens? The last threshold before the first failure holds with probability `1 - epsilon` for any distribution
of texts (Learn then Test, fixed-sequence testing). The model's folder keeps it.

Experimental: on the small models measured, no threshold or hardly any layer could be saved (benchmarks/log).
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from memlm.api.params import StreamRequest
from memlm.base.files import write_atomic
from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus
from memlm.errors import Corrupt, InvalidInput, NotFound
from memlm.model import Decoder, DecoderState
from memlm.model.early_exit import HALTING, ExitRule, forward_early_exit, hoeffding_bentkus, learned_to_halt
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.model.files.gguf import companion
from memlm.retrieval.retriever import Retriever

RULE_FILE = "early_exit.json"
THRESHOLDS = (0.999, 0.99, 0.97, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
PROMPT_TOKENS, DRAWN_TOKENS = 32, 24


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """The result of a calibration. `rule` is None if no threshold passed. `layers_share` and `time_share` compare
    layers and time per token with the whole model. `disagreement` is the share of greedy tokens that differ.
    `nats_change` is the loss on the held-out text in nats per token.
    """

    rule: ExitRule | None
    delta: float
    epsilon: float
    prompts: int
    p_value: float
    disagreement: float
    layers_share: float
    time_share: float
    nats_change: float


@dataclass(frozen=True, slots=True)
class _Continuations:
    """The greedy continuations under one threshold."""

    tokens: list[list[int]]
    layers: float
    seconds: float


def calibrate(
    model: str | Path | Checkpoint,
    texts: Corpus,
    *,
    measure: str = "softmax",
    delta: float = 0.1,
    epsilon: float = 0.05,
    prompts: int = 100,
    progress: Progress = silent,
) -> CalibrationReport:
    """Finds a model's threshold for early exit, and writes it to the model's folder.

    Raises InvalidInput if the texts hold too few prompts, or if delta and epsilon are no probabilities.
    """
    for name, value in (("delta", delta), ("epsilon", epsilon)):
        if not 0 < value < 1:
            raise InvalidInput(f"{name} is {value}; expected above 0 and below 1", field=name)
    checkpoint = model if isinstance(model, Checkpoint) else load_checkpoint(model)
    token_runs = _prompts(checkpoint, texts, prompts)
    whole = _continue_all(checkpoint, token_runs, ExitRule(measure, 1.0), progress)
    best: tuple[ExitRule, _Continuations, float] | None = None
    p_value = 1.0
    for threshold in THRESHOLDS:
        rule = ExitRule(measure, threshold)
        trial = _continue_all(checkpoint, token_runs, rule, progress)
        p_value = hoeffding_bentkus(_disagreement(trial, whole), delta, len(token_runs))
        if p_value > epsilon:
            break
        best = (rule, trial, p_value)
    if best is None:
        return CalibrationReport(None, delta, epsilon, len(token_runs), p_value, 0.0, 1.0, 1.0, 0.0)
    rule, trial, p_value = best
    report = CalibrationReport(
        rule=rule,
        delta=delta,
        epsilon=epsilon,
        prompts=len(token_runs),
        p_value=p_value,
        disagreement=_disagreement(trial, whole),
        layers_share=trial.layers / checkpoint.decoder.config.num_layers,
        time_share=trial.seconds / whole.seconds,
        nats_change=_nats(checkpoint, token_runs, rule) - _nats(checkpoint, token_runs, ExitRule(measure, 1.0)),
    )
    write_atomic(companion(checkpoint.path, RULE_FILE), (json.dumps(asdict(report), indent=2) + "\n").encode())
    return report


class EarlyExitDecoder:
    """An `OwnDecoder` that reads tokens through as few layers as a rule allows.

    It gives no keys to search a datastore with, because the layer that they come from may be left out.
    """

    def __init__(self, decoder: Decoder, rule: ExitRule) -> None:
        self._decoder, self._rule = decoder, rule

    def __call__(self, token_11: Int[Tensor, "1 1"], state: DecoderState) -> Float[Tensor, "1 1 D"]:
        """Reads one token into `state` and returns its final hidden state."""
        hidden_11D, _ = forward_early_exit(self._decoder, token_11, state, self._rule)
        return hidden_11D


def own_decoder_of(
    checkpoint: Checkpoint, request: StreamRequest, retriever: Retriever | None
) -> EarlyExitDecoder | None:
    """The decoder of a request that asks for early exit, None for any other.

    Raises InvalidInput for one that searches a datastore, and NotFound as `rule_of`.
    """
    if not request.early_exit:
        return None
    if retriever is not None and retriever.is_needed(request.neighbors):
        raise InvalidInput(
            "early_exit leaves out the layer whose input the datastore is searched with; ask without a datastore, or"
            " without early_exit",
            field="early_exit",
        )
    return EarlyExitDecoder(checkpoint.decoder, rule_of(checkpoint))


def rule_of(checkpoint: Checkpoint) -> ExitRule:
    """Returns the rule of a model: the calibrated one, or else that of the halting that it has learned.

    Raises NotFound for a model that has neither.
    """
    is_calibrated = companion(checkpoint.path, RULE_FILE).is_file()
    if not is_calibrated and learned_to_halt(checkpoint.decoder):
        return ExitRule("halt", HALTING)
    return load_rule(checkpoint.path)


def load_rule(folder: Path) -> ExitRule:
    """Loads the rule of a calibrated model. Raises NotFound for a model that was not calibrated."""
    path = companion(folder, RULE_FILE)
    if not path.is_file():
        raise NotFound(
            f"{folder} was not calibrated for leaving early; run `memlm calibrate` on held-out text first",
            kind="early_exit",
            name=str(folder),
        )
    try:
        return ExitRule(**json.loads(path.read_text(encoding="utf-8"))["rule"])
    except (ValueError, KeyError, TypeError, InvalidInput) as error:
        raise Corrupt(f"{path} holds no rule ({error}); run `memlm calibrate` again") from error


def _prompts(checkpoint: Checkpoint, texts: Corpus, count: int) -> list[list[int]]:
    """Returns runs of tokens from all over the texts. The second half of each is for predictions."""
    context = checkpoint.decoder.config.max_length or checkpoint.decoder.config.context_length
    drawn = min(DRAWN_TOKENS, context // 2)
    size = min(PROMPT_TOKENS, context - drawn - 1) + drawn
    runs = []
    for document in texts:
        tokens = checkpoint.tokenizer.encode(document.text).tolist()
        runs += [tokens[begin : begin + size] for begin in range(0, len(tokens) - size + 1, size)]
    if len(runs) < 20:
        raise InvalidInput(
            f"the texts hold {len(runs)} runs of {size} tokens; calibrating takes at least 20: give more text",
            field="texts",
        )
    chosen = np.linspace(0, len(runs) - 1, min(count, len(runs))).astype(int)
    return [[checkpoint.tokenizer.start_id, *runs[place]] for place in chosen]


def _continue_all(
    checkpoint: Checkpoint, token_runs: list[list[int]], rule: ExitRule, progress: Progress
) -> _Continuations:
    decoder, texts, layers, steps, seconds = checkpoint.decoder, [], 0, 0, 0.0
    for number, prompt in enumerate(token_runs):
        drawn = len(prompt) // 2
        state = decoder.new_state(capacity=len(prompt) + drawn)
        with torch.inference_mode():
            hidden_BTD, _ = decoder(torch.tensor([prompt[:-drawn]]), state)
            token, tokens = int(decoder.logits(hidden_BTD[0, -1]).argmax()), []
            begin = time.perf_counter()
            for _ in range(drawn):
                tokens.append(token)
                hidden_BTD, used = forward_early_exit(decoder, torch.tensor([[token]]), state, rule)
                token = int(decoder.logits(hidden_BTD[0, -1]).argmax())
                layers, steps = layers + used, steps + 1
            seconds += time.perf_counter() - begin
        texts.append([*tokens, token])
        progress(f"threshold {rule.threshold}", number + 1, len(token_runs))
    return _Continuations(texts, layers / steps, seconds)


def _disagreement(trial: _Continuations, whole: _Continuations) -> float:
    """Returns the share of tokens that differ, averaged over texts."""
    pairs = zip(trial.tokens, whole.tokens, strict=True)
    return float(np.mean([np.mean(np.array(tokens) != np.array(whole_tokens)) for tokens, whole_tokens in pairs]))


def _nats(checkpoint: Checkpoint, token_runs: list[list[int]], rule: ExitRule, texts: int = 20) -> float:
    """Returns nats per token of the held-out text itself."""
    decoder, nats = checkpoint.decoder, []
    for tokens in token_runs[:texts]:
        state = decoder.new_state(capacity=len(tokens))
        with torch.inference_mode():
            for token, following in pairwise(tokens):
                hidden_BTD, _ = forward_early_exit(decoder, torch.tensor([[token]]), state, rule)
                nats.append(-float(decoder.logprobs(hidden_BTD[0, -1])[following]))
    return float(np.mean(nats))
