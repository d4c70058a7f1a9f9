"""Documents -> a trained model.

A run keeps its settings, tokens and checkpoints in `OUT/training`, to resume from. At the end only the model and its
metrics remain. Several processes started by `torchrun` train one model together.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus, Texts, corpus_of
from memlm.data.tokenizer import FILE_NAME as TOKENIZER_FILE
from memlm.data.tokenizer import Tokenizer
from memlm.errors import AlreadyExists, Corrupt, InvalidInput, MemlmError, NotFound, check_path
from memlm.model import Decoder, ModelConfig
from memlm.model.adapters import Adapter, new_adapter, parse_adapter
from memlm.model.files.adapter_files import ADAPTER_CONFIG, AdapterNames, save_adapter
from memlm.model.files.checkpoint import CONFIG_FILE, Checkpoint, load_checkpoint, save_checkpoint
from memlm.training.config import PRESETS, TrainConfig
from memlm.training.data import write_tokens
from memlm.training.distributed import ProcessGroup, device_of
from memlm.training.init_from import add_memories, config_with_memories
from memlm.training.metrics import summary_writer
from memlm.training.recipe import Recipe, recipe_of
from memlm.training.trainer import CHECKPOINT_FILE, Trainer
from memlm.training.validation import HeldOut

NEW = "new"  # the name of the adapter that learns
RUN_FILE, METRICS_FILE = "run.json", "metrics.csv"

__all__ = ["PRESETS", "TrainConfig", "TrainReport", "train"]


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The result of a training run. Losses are in nats per token. `valid_loss` is None without held-out text."""

    steps: int
    tokens: int
    losses: tuple[float, ...]
    valid_loss: float | None
    tokens_per_s: float
    num_parameters: int

    @classmethod
    def of(cls, trainer: Trainer, tokens_per_s: float) -> TrainReport:
        """The report of a trainer whose steps are taken."""
        steps = len(trainer.records)
        return cls(
            steps, steps * trainer.tokens_per_step, tuple(trainer.losses), trainer.valid_loss, tokens_per_s,
            trainer.learning.num_parameters,
        )  # fmt: skip


def train(
    corpus: Texts,
    out: str | Path,
    config: TrainConfig = PRESETS["tiny"],
    *,
    valid: Texts | None = None,
    tokenizer: Tokenizer | None = None,
    init_from: str | Path | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> TrainReport:
    """Trains a model on a corpus and writes its folder.

    `init_from` is a trained model, of memlm or of another family, to continue from. Its shape and tokenizer stay, and
    the memories among `config.model_fields` are added. With a `config.adapter`, only that learns, and `out` gets the
    adapter alone (`memlm.model.files.adapter_files`). An interrupted run leaves its last checkpoint in `out/training`.
    With `resume=True` it continues from there, with its original configuration. Raises AlreadyExists if `out` holds a
    model or an unfinished run, NotFound if there is no run to resume, and InvalidInput for a corpus shorter than one
    window and for settings that contradict each other.
    """
    check_path("out", out, "a new folder")
    corpus, valid = corpus_of(corpus), None if valid is None else corpus_of(valid)
    out, work = Path(out), Path(out) / "training"
    group = ProcessGroup.join(device_of(config))
    if resume:
        config, init_from = _interrupted(out, work)
    _check(config, group, valid, tokenizer, init_from)
    base = load_checkpoint(init_from, trainable=True) if init_from else None
    tokenizer = base.tokenizer if base else tokenizer
    recipe = recipe_of(config, _shape_of(base, config, config.vocab_size))
    recipe.check(corpus, valid, tokenizer, resumes=resume)
    progress = progress if group.is_main else silent
    if group.is_main and not resume:
        _start(out, work, config, init_from)
    group.barrier()
    with ExitStack() as held:
        with _nothing_left(out, work, group):
            if group.is_main:
                _tokenize(recipe, corpus, work, tokenizer, progress)
            group.barrier()
            trainer = _trainer(recipe, corpus, valid, work, base, group, held, progress)
        tokens_per_s = trainer.run(work, progress)
    if group.is_main:
        _finish(out, work, trainer, base)
    group.destroy()
    return TrainReport.of(trainer, tokens_per_s)


def _shape_of(base: Checkpoint | None, config: TrainConfig, vocab_size: int) -> ModelConfig:
    """The shape of the model that learns: a new one for a vocabulary, or that of the base with memories added."""
    if base is None:
        return config.model(vocab_size)
    return config_with_memories(base.decoder.config, config.model_fields)


@contextlib.contextmanager
def _nothing_left(out: Path, work: Path, group: ProcessGroup) -> Iterator[None]:
    """A corpus that cannot be trained on leaves nothing behind, except checkpoints of earlier runs."""
    try:
        yield
    except MemlmError:
        if group.is_main and not (work / CHECKPOINT_FILE).exists():
            shutil.rmtree(work)
            with contextlib.suppress(OSError):
                out.rmdir()
        raise


def _tokenize(recipe: Recipe, corpus: Corpus, work: Path, tokenizer: Tokenizer | None, progress: Progress) -> None:
    """Writes the tokenizer and the tokens of a run, unless an interrupted one has."""
    tokenizer = _tokenizer_for(corpus, work, recipe.settings, tokenizer, progress)
    for name, texts in recipe.divided(corpus).items():
        if not (work / name).exists():
            write_tokens(texts, tokenizer, work / name, num_bytes=texts.num_bytes, progress=progress)


def _trainer(
    recipe: Recipe,
    corpus: Corpus,
    valid: Corpus | None,
    work: Path,
    base: Checkpoint | None,
    group: ProcessGroup,
    held: ExitStack,
    progress: Progress,
) -> Trainer:
    """Returns a trainer at its first step, on the tokens of a run. `held` closes what the decoder reads beside them."""
    config, tokenizer = recipe.settings, Tokenizer.load(work)
    score = None
    if valid is not None:
        score = partial(HeldOut(valid, tokenizer).loss, group=group, progress=progress)
    torch.manual_seed(config.seed)
    decoder, adapter = _learning(base, _shape_of(base, config, tokenizer.vocab_size), config)
    held.enter_context(recipe.prepared(decoder, tokenizer, progress))
    data = recipe.data([work / name for name in recipe.divided(corpus)], tokenizer)
    return Trainer(config, decoder.to(device_of(config)), data, group, score, adapter)


def _finish(out: Path, work: Path, trainer: Trainer, base: Checkpoint | None) -> None:
    """Writes the model, or the adapter, with the metrics, and removes what the run kept."""
    if base is not None and isinstance(trainer.learning, Adapter):
        save_adapter(out, trainer.learning, base)
    else:
        save_checkpoint(out, trainer.decoder.eval(), Tokenizer.load(work))
    (work / METRICS_FILE).replace(out / METRICS_FILE)
    shutil.rmtree(work)


def _learning(
    base: Checkpoint | None, model_config: ModelConfig, config: TrainConfig
) -> tuple[Decoder, Adapter | None]:
    """Returns the decoder, and the adapter that alone learns, if the run has one. Seed torch before."""
    if base is None or not config.adapter:
        return (add_memories(base.decoder, model_config) if base else Decoder(model_config)), None
    # Without a shorter context, the model needs no second copy.
    is_same = model_config == base.decoder.config
    decoder = (base.decoder if is_same else add_memories(base.decoder, model_config)).requires_grad_(False)
    decoder.to(device_of(config))
    adapter = new_adapter(parse_adapter(config.adapter), decoder, AdapterNames.of(base).parts)
    decoder.adapters.attach(NEW, adapter, decoder, trainable=True)
    decoder.adapters.default = NEW
    return decoder, adapter


def _check(
    config: TrainConfig,
    group: ProcessGroup,
    valid: Corpus | None,
    tokenizer: Tokenizer | None,
    init_from: str | Path | None,
) -> None:
    """Raises InvalidInput for settings that would fail after something was written."""
    group.shard(range(config.batch_size))
    if config.tensorboard and group.is_main:
        summary_writer()
    if config.valid_every and valid is None:
        raise InvalidInput(
            f"valid_every is {config.valid_every}, but no text is set aside to score; give --valid", field="valid"
        )
    if config.adapter and not init_from:
        raise InvalidInput("an adapter changes a trained model; give it as --init-from", field="init_from")
    if config.adapter and (added := sorted(config.model_fields.keys() - {"context_length"})):
        raise InvalidInput(
            f"{', '.join(added)} would change the model, which an adapter leaves as it is; leave out one",
            field=added[0],
        )
    if init_from and tokenizer:
        raise InvalidInput(
            "a trained model keeps its own tokenizer; leave --tokenizer or --init-from out",
            field="tokenizer",
        )


def _start(out: Path, work: Path, config: TrainConfig, init_from: str | Path | None) -> None:
    if (out / CONFIG_FILE).exists() or (out / ADAPTER_CONFIG).exists():
        kind = "a model" if (out / CONFIG_FILE).exists() else "an adapter"
        raise AlreadyExists(f"{out} holds {kind} already; choose another folder for the new one")
    if (work / RUN_FILE).exists():
        raise AlreadyExists(f"{out} holds an interrupted training run; go on with --resume, or remove the folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AlreadyExists(f"{out} exists and is not empty; choose another place for the model")
    work.mkdir(parents=True)
    record = {"config": asdict(config), "init_from": str(init_from) if init_from else None}
    (work / RUN_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _interrupted(out: Path, work: Path) -> tuple[TrainConfig, str | None]:
    if (out / CONFIG_FILE).exists() or (out / ADAPTER_CONFIG).exists():
        kind = "a model" if (out / CONFIG_FILE).exists() else "an adapter"
        raise AlreadyExists(f"{out} holds {kind} whose training is complete; there is nothing to resume")
    if not (work / RUN_FILE).is_file():
        raise NotFound(
            f"{out} holds no interrupted training run; start one without --resume", kind="run", name=str(out)
        )
    try:
        record: dict[str, Any] = json.loads((work / RUN_FILE).read_text(encoding="utf-8"))
        return TrainConfig.from_dict(record["config"]), record["init_from"]
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
