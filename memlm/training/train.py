"""Documents -> a trained model.

A run keeps what it needs to go on in `OUT/training`: its settings, its tokens, its checkpoints. When it is through, the
model and its metrics are all that is left. Started by `torchrun`, several processes train one model together.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus
from memlm.data.tokenizer import FILE_NAME as TOKENIZER_FILE
from memlm.data.tokenizer import Tokenizer
from memlm.errors import AlreadyExists, Corrupt, InvalidInput, MemlmError, NotFound
from memlm.model import Decoder
from memlm.model.checkpoint import CONFIG_FILE, Checkpoint, load_checkpoint, save_checkpoint
from memlm.training.config import PRESETS, TrainConfig
from memlm.training.data import Batches, DocumentStreams, write_tokens
from memlm.training.distributed import ProcessGroup, device_of
from memlm.training.init_from import add_memories, config_with_memories
from memlm.training.metrics import summary_writer
from memlm.training.trainer import CHECKPOINT_FILE, Trainer
from memlm.training.validation import HeldOut

TOKENS_FILE, RUN_FILE, METRICS_FILE = "tokens.u32", "run.json", "metrics.csv"

__all__ = ["PRESETS", "TrainConfig", "TrainReport", "train"]


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
    init_from: str | Path | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> TrainReport:
    """Trains a model on a corpus and writes its folder.

    `init_from` is a model, ours or another's, to go on with: its shape and its tokenizer stay, and the memories among
    `config.model_fields` are added. An interrupted run leaves its last checkpoint in `out/training`; `resume=True`
    goes on from there, with the configuration it was started with. Raises AlreadyExists where a model or an unfinished
    run is in `out`, NotFound where there is no run to resume, InvalidInput for a corpus too short for one window, and
    for settings that do not go together.
    """
    out, work = Path(out), Path(out) / "training"
    group = ProcessGroup.join(device_of(config))
    if resume:
        config, init_from = _interrupted(out, work)
    _check(config, group, valid, tokenizer, init_from)
    base = load_checkpoint(init_from, trainable=True) if init_from else None
    if base:
        tokenizer, _ = base.tokenizer, config_with_memories(base.decoder.config, config.model_fields)
    if group.is_main and not resume:
        _start(out, work, config, init_from)
    group.barrier()
    told = progress if group.is_main else silent
    try:
        if group.is_main:
            _prepare(corpus, work, config, tokenizer, told)
        group.barrier()
        tokenizer = Tokenizer.load(work)
        held = None if valid is None else HeldOut(valid, tokenizer)
        trainer = _make_trainer(config, base, tokenizer, work / TOKENS_FILE, group, held, told)
    except MemlmError:  # a corpus that cannot be trained on leaves nothing behind; what was learnt before stays
        if group.is_main and not (work / CHECKPOINT_FILE).exists():
            shutil.rmtree(work)
            with contextlib.suppress(OSError):
                out.rmdir()
        raise
    tokens_per_s = trainer.run(work, told)
    if group.is_main:
        save_checkpoint(out, trainer.decoder.eval(), tokenizer)
        (work / METRICS_FILE).replace(out / METRICS_FILE)
        shutil.rmtree(work)
    group.destroy()
    return TrainReport(
        steps=len(trainer.records),
        tokens=len(trainer.records) * trainer.tokens_per_step,
        losses=tuple(trainer.losses),
        valid_loss=trainer.valid_loss,
        tokens_per_s=tokens_per_s,
        num_parameters=trainer.decoder.num_parameters,
    )


def loss_on(valid: Corpus, decoder: Decoder, tokenizer: Tokenizer) -> float:
    """Nats per token of held-out documents, each read from its beginning with an empty memory."""
    return HeldOut(valid, tokenizer).loss(decoder)


def _check(
    config: TrainConfig,
    group: ProcessGroup,
    valid: Corpus | None,
    tokenizer: Tokenizer | None,
    init_from: str | Path | None,
) -> None:
    """Refuses, before anything is written, what would fail or mean nothing later."""
    group.shard(range(config.batch_size))
    if config.tensorboard and group.is_main:
        summary_writer()
    if config.valid_every and valid is None:
        raise InvalidInput(
            f"valid_every is {config.valid_every}, but no text is set aside to score; give --valid", field="valid"
        )
    if init_from and tokenizer:
        raise InvalidInput(
            "a model that has learnt already keeps its own tokenizer; leave --tokenizer or --init-from out",
            field="tokenizer",
        )


def _prepare(corpus: Corpus, work: Path, config: TrainConfig, tokenizer: Tokenizer | None, told: Progress) -> None:
    """Leaves a tokenizer and the corpus' tokens in the run's folder, where they are not there yet."""
    tokenizer = _tokenizer_for(corpus, work, config, tokenizer, told)
    if not (work / TOKENS_FILE).exists():
        write_tokens(corpus, tokenizer, work / TOKENS_FILE, num_bytes=corpus.num_bytes, progress=told)


def _make_trainer(
    config: TrainConfig,
    base: Checkpoint | None,
    tokenizer: Tokenizer,
    tokens: Path,
    group: ProcessGroup,
    held: HeldOut | None,
    told: Progress,
) -> Trainer:
    """The decoder that is to learn, what it reads, and what it is judged by."""
    torch.manual_seed(config.seed)
    if base:
        decoder = add_memories(base.decoder, config_with_memories(base.decoder.config, config.model_fields))
    else:
        decoder = Decoder(config.model(tokenizer.vocab_size))
    decoder = decoder.to(device_of(config))
    length, rows = decoder.config.context_length, config.batch_size * config.accumulate
    data: Batches | DocumentStreams
    if decoder.config.is_segmented:
        data = DocumentStreams(tokens, length, rows, config.seed, tokenizer.start_id, tokenizer.end_id)
    else:
        data = Batches(tokens, length, rows, config.seed)
    score = None if held is None else (lambda learning: held.loss(learning, group, told))
    return Trainer(config, decoder, data, group, score)


def _start(out: Path, work: Path, config: TrainConfig, init_from: str | Path | None) -> None:
    if (out / CONFIG_FILE).exists():
        raise AlreadyExists(f"{out} holds a model already; choose another folder for the new one")
    if (work / RUN_FILE).exists():
        raise AlreadyExists(f"{out} holds an interrupted training run; go on with --resume, or remove the folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AlreadyExists(f"{out} is there and is not empty; choose another place for the model")
    work.mkdir(parents=True)
    told = {"config": asdict(config), "init_from": str(init_from) if init_from else None}
    (work / RUN_FILE).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _interrupted(out: Path, work: Path) -> tuple[TrainConfig, str | None]:
    if (out / CONFIG_FILE).exists():
        raise AlreadyExists(f"{out} holds a model whose training is complete; there is nothing to resume")
    if not (work / RUN_FILE).is_file():
        raise NotFound(
            f"{out} holds no interrupted training run; start one without --resume", kind="run", name=str(out)
        )
    try:
        told: dict[str, Any] = json.loads((work / RUN_FILE).read_text(encoding="utf-8"))
        return TrainConfig.from_dict(told["config"]), told["init_from"]
    except (ValueError, TypeError, KeyError, InvalidInput) as error:
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
