"""Documents -> a trained model.

Muon for the matrices inside the blocks (Keller Jordan, 2024; scaled as in arXiv 2502.16982), AdamW (1711.05101) for
the rest, gradient clipping, linear warm-up, cosine decay; matrix products in bfloat16 where the processor has
instructions for it. A checkpoint holds all that a run needs to go on to the same losses.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import pickle
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from memlm.checkpoint import CONFIG_FILE, save_checkpoint
from memlm.corpus import Corpus
from memlm.errors import AlreadyExists, Corrupt, InvalidInput, MemlmError, NotFound
from memlm.keys import score_tokens
from memlm.model import Decoder, ModelConfig
from memlm.progress import Progress, silent
from memlm.tokenizer import FILE_NAME as TOKENIZER_FILE
from memlm.tokenizer import Tokenizer
from memlm.training_data import Batches, write_tokens

TOKENS_FILE, CHECKPOINT_FILE, RUN_FILE = "tokens.u32", "checkpoint.pt", "run.json"


@dataclass(frozen=True)
class TrainConfig:
    """The shape of the model and how it is trained. One of `steps`, `epochs`, `minutes` says for how long.

    `minutes` fixes the number of steps from the speed of the first ones, so only the other two are reproducible.
    """

    dim: int = 192
    num_layers: int = 4
    num_heads: int = 3
    num_kv_heads: int = 1
    ff_dim: int = 512
    context_length: int = 256
    vocab_size: int = 2048
    batch_size: int = 4
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    warmup: float = 0.05
    grad_clip: float = 1.0
    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    checkpoint_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses sizes and rates that mean nothing."""
        for name in ("batch_size", "checkpoint_every", "learning_rate", "grad_clip"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} is {getattr(self, name)}; expected more than 0", field=name)
        if not 0 <= self.warmup <= 1:
            raise InvalidInput(f"warmup is {self.warmup}; expected a share of the steps, 0 to 1", field="warmup")
        lengths = [value for value in (self.steps, self.epochs, self.minutes) if value is not None]
        if len(lengths) > 1 or any(not value > 0 for value in lengths):
            raise InvalidInput("give one of steps, epochs and minutes, more than 0", field="steps")

    def model(self, vocab_size: int) -> ModelConfig:
        """The decoder's shape, for the vocabulary that the tokenizer came to."""
        shape = (self.dim, self.num_layers, self.num_heads, self.num_kv_heads, self.ff_dim, self.context_length)
        return ModelConfig(vocab_size, *shape)


PRESETS = {
    "tiny": TrainConfig(),
    "small": TrainConfig(
        dim=512, num_layers=8, num_heads=8, num_kv_heads=4, ff_dim=1408, context_length=512, vocab_size=16_384,
        learning_rate=1e-3, batch_size=32,
    ),
    "base": TrainConfig(
        dim=768, num_layers=12, num_heads=12, num_kv_heads=4, ff_dim=2048, context_length=1024, vocab_size=32_768,
        learning_rate=6e-4, batch_size=64,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What came of a training run. Losses are nats per token; `valid_loss` is None where no text was set aside."""

    steps: int
    tokens: int
    losses: tuple[float, ...]
    valid_loss: float | None
    tokens_per_s: float
    num_parameters: int


def train(
    corpus: Corpus,
    out: str | Path,
    config: TrainConfig = PRESETS["tiny"],
    *,
    valid: Corpus | None = None,
    tokenizer: Tokenizer | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> TrainReport:
    """Trains a model on a corpus and writes its folder.

    An interrupted run leaves its last checkpoint in `out/training`; `resume=True` goes on from there, with the
    configuration it was started with. Raises AlreadyExists where a model or an unfinished run is in `out`, NotFound
    where there is no run to resume, InvalidInput for a corpus too short for one window.
    """
    out, work = Path(out), Path(out) / "training"
    if resume:
        config = _config_of_interrupted(out, work)
    else:
        _start(out, work, config)
    try:
        tokenizer = _tokenizer_for(corpus, work, config, tokenizer, progress)
        if not (work / TOKENS_FILE).exists():
            write_tokens(corpus, tokenizer, work / TOKENS_FILE, num_bytes=corpus.num_bytes, progress=progress)
        batches = Batches(work / TOKENS_FILE, config.context_length, config.batch_size, config.seed)
    except MemlmError:  # a corpus that cannot be trained on leaves nothing behind
        shutil.rmtree(work)
        with contextlib.suppress(OSError):
            out.rmdir()
        raise
    run = TrainingRun(config, tokenizer.vocab_size, batches)
    tokens_per_s = run.to_the_end(work / CHECKPOINT_FILE, progress)
    run.decoder.eval()
    save_checkpoint(out, run.decoder, tokenizer)
    _write_metrics(out / "metrics.csv", run.losses, config)
    shutil.rmtree(work)
    return TrainReport(
        steps=run.num_steps,
        tokens=run.num_steps * config.batch_size * config.context_length,
        losses=tuple(run.losses),
        valid_loss=None if valid is None else _loss_on(valid, run.decoder, tokenizer),
        tokens_per_s=tokens_per_s,
        num_parameters=run.decoder.num_parameters,
    )


class TrainingRun:
    """A decoder in training, its optimizers, and how far it has come."""

    def __init__(self, config: TrainConfig, vocab_size: int, batches: Batches) -> None:
        """Starts from the seed's own initial parameters."""
        torch.manual_seed(config.seed)
        self.config, self.batches = config, batches
        self.decoder = Decoder(config.model(vocab_size))
        matrices = [p for name, p in self.decoder.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
        others = [p for p in self.decoder.parameters() if all(p is not matrix for matrix in matrices)]
        rate, decay = config.learning_rate, config.weight_decay
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (muon, adamw)
        self.bfloat16 = has_fast_bfloat16()
        self.losses: list[float] = []
        self.num_steps = 0

    def to_the_end(self, checkpoint: Path, progress: Progress = silent) -> float:
        """Takes every step that is left, with a checkpoint now and then; gives the tokens read per second."""
        if checkpoint.exists():
            self.restore(checkpoint)
        self.num_steps = self.num_steps or self._planned_steps()
        begin, first = time.perf_counter(), len(self.losses)
        while len(self.losses) < self.num_steps:
            self.step()
            if len(self.losses) % self.config.checkpoint_every == 0:
                self.save(checkpoint)
            progress("train", len(self.losses), self.num_steps, f"loss {_recent(self.losses):.3f}")
        tokens = (len(self.losses) - first) * self.config.batch_size * self.config.context_length
        return tokens / max(time.perf_counter() - begin, 1e-9)

    def step(self) -> None:
        """One batch forward and back, and one step of the optimizer."""
        number = len(self.losses)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate_at(number, self.num_steps, self.config)
        loss = self._loss(number)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), self.config.grad_clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.decoder.zero_grad()
        self.losses.append(loss.item())

    def save(self, path: Path) -> None:
        """Writes all that going on needs, under a temporary name first."""
        temporary = path.with_suffix(".tmp")
        state = {
            "decoder": self.decoder.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "losses": self.losses,
            "num_steps": self.num_steps,
        }
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def restore(self, path: Path) -> None:
        """Takes up where `save` left off. Raises Corrupt for a file it did not write."""
        try:
            state = torch.load(path, weights_only=True)
            self.decoder.load_state_dict(state["decoder"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.losses, self.num_steps = state["losses"], state["num_steps"]
        except (RuntimeError, KeyError, ValueError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise Corrupt(
                f"{path} is not a checkpoint of this run ({error}); remove the folder and train anew"
            ) from error

    def _loss(self, number: int) -> Tensor:
        inputs_BT, targets_BT = self.batches.at(number)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            logits_BTV = self.decoder.logits(self.decoder(inputs_BT)[0])
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())

    def _planned_steps(self) -> int:
        config = self.config
        if config.steps is not None:
            return config.steps
        if config.minutes is not None:
            return max(1, int(config.minutes * 60 / self._seconds_per_step()))
        return max(1, round((config.epochs or 1) * self.batches.windows_per_epoch / config.batch_size))

    def _seconds_per_step(self, tries: int = 4) -> float:
        """The pace of steps that are not taken; the first try only warms up."""
        seconds = []
        for _ in range(tries):
            begin = time.perf_counter()
            self._loss(0).backward()
            self.decoder.zero_grad()
            seconds.append(time.perf_counter() - begin)
        return sum(seconds[1:]) / (tries - 1)


def learning_rate_at(step: int, steps: int, config: TrainConfig) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    warmup = max(1, round(config.warmup * steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    fraction = (step - warmup) / max(1, steps - warmup)
    return config.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * fraction)))


def has_fast_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 matrices in hardware."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _start(out: Path, work: Path, config: TrainConfig) -> None:
    if (out / CONFIG_FILE).exists():
        raise AlreadyExists(f"{out} holds a model already; choose another folder for the new one")
    if (work / RUN_FILE).exists():
        raise AlreadyExists(f"{out} holds an interrupted training run; go on with --resume, or remove the folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AlreadyExists(f"{out} is there and is not empty; choose another place for the model")
    work.mkdir(parents=True)
    (work / RUN_FILE).write_text(json.dumps(asdict(config), indent=2) + "\n", encoding="utf-8")


def _config_of_interrupted(out: Path, work: Path) -> TrainConfig:
    if (out / CONFIG_FILE).exists():
        raise AlreadyExists(f"{out} holds a model whose training is complete; there is nothing to resume")
    if not (work / RUN_FILE).is_file():
        raise NotFound(
            f"{out} holds no interrupted training run; start one without --resume", kind="run", name=str(out)
        )
    try:
        return TrainConfig(**json.loads((work / RUN_FILE).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise Corrupt(f"{work / RUN_FILE} cannot be read ({error}); remove the folder and train anew") from error


def _tokenizer_for(
    corpus: Corpus, work: Path, config: TrainConfig, tokenizer: Tokenizer | None, progress: Progress
) -> Tokenizer:
    if (work / TOKENIZER_FILE).exists():
        return Tokenizer.load(work)
    if tokenizer is None:
        progress("learn tokens", 0, corpus.num_bytes)
        tokenizer = Tokenizer.train(_texts(corpus, progress), vocab_size=config.vocab_size)
    tokenizer.save(work)
    return tokenizer


def _texts(corpus: Corpus, progress: Progress) -> Iterator[str]:
    done, total = 0, corpus.num_bytes
    for document in corpus:
        yield document.text
        done += document.num_bytes
        progress("learn tokens", done, max(done, total))


def _loss_on(valid: Corpus, decoder: Decoder, tokenizer: Tokenizer) -> float:
    scores = [score_tokens(decoder, tokenizer.encode(document.text), tokenizer.start_id) for document in valid]
    return -sum(float(score_N.sum()) for score_N in scores) / max(1, sum(len(score_N) for score_N in scores))


def _write_metrics(path: Path, losses: list[float], config: TrainConfig) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss", "learning_rate"])
        for step, loss in enumerate(losses):
            writer.writerow([step, f"{loss:.6f}", f"{learning_rate_at(step, len(losses), config):.6g}"])


def _recent(losses: list[float], window: int = 20) -> float:
    return sum(losses[-window:]) / len(losses[-window:])
