"""Documents -> a trained model.

A run keeps its settings, tokens and checkpoints in `OUT/training`, to resume from. At the end only the model and its
metrics remain. Several processes started by `torchrun` train one model together.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
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
from memlm.model.adapter_files import ADAPTER_CONFIG, AdapterNames, save_adapter
from memlm.model.adapters import Adapter, new_adapter, parse_adapter
from memlm.model.checkpoint import CONFIG_FILE, Checkpoint, load_checkpoint, save_checkpoint
from memlm.training.config import PRESETS, TrainConfig
from memlm.training.data import Batches, DocumentStreams, DomainStreams, TrainingData, write_tokens
from memlm.training.distributed import ProcessGroup, device_of
from memlm.training.init_from import add_memories, config_with_memories
from memlm.training.metrics import summary_writer
from memlm.training.trainer import CHECKPOINT_FILE, Trainer
from memlm.training.validation import HeldOut
from memlm.zoo.datastore_chunks import DatastoreChunks, check_chunk_store

NEW = "new"  # the name of the adapter that learns
TOKENS_FILE, RUN_FILE, METRICS_FILE = "tokens.u32", "run.json", "metrics.csv"

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
    adapter alone (`memlm.model.adapter_files`). An interrupted run leaves its last checkpoint in `out/training`.
    With `resume=True` it continues from there, with its original configuration. Raises AlreadyExists if `out` holds a
    model or an unfinished run, NotFound if there is no run to resume, and InvalidInput for a corpus shorter than one
    window and for settings that contradict each other. Each path of the corpus is a domain of a model with experts for
    them.
    """
    check_path("out", out, "a new folder")
    corpus, valid = corpus_of(corpus), None if valid is None else corpus_of(valid)
    out, work = Path(out), Path(out) / "training"
    group = ProcessGroup.join(device_of(config))
    if resume:
        config, init_from = _interrupted(out, work)
    _check(config, group, valid, tokenizer, init_from)
    base, model_config = None, None
    if init_from:
        base = load_checkpoint(init_from, trainable=True)
        tokenizer, model_config = base.tokenizer, config_with_memories(base.decoder.config, config.model_fields)
    has_tokenizer = resume or tokenizer is not None
    _check_cross(model_config or config.model(config.vocab_size), config, has_tokenizer=has_tokenizer)
    if config.chunk_store and tokenizer is not None:  # before the corpus is tokenized
        check_chunk_store(config.chunk_store, tokenizer)
    domains = _domains(model_config or config.model(config.vocab_size), corpus, config, has_valid=valid is not None)
    files = [work / f"tokens-{name}.u32" for name in range(len(domains))] or [work / TOKENS_FILE]
    progress = progress if group.is_main else silent
    if group.is_main and not resume:
        _start(out, work, config, init_from)
    group.barrier()
    try:
        if group.is_main:
            tokenizer = _tokenizer_for(corpus, work, config, tokenizer, progress)
            for path, part in zip(files, _by_domain(corpus, len(files)), strict=True):
                if not path.exists():
                    write_tokens(part, tokenizer, path, num_bytes=part.num_bytes, progress=progress)
        group.barrier()
        tokenizer = Tokenizer.load(work)
        held_out = None if valid is None else HeldOut(valid, tokenizer)
        torch.manual_seed(config.seed)
        model_config = model_config or config.model(tokenizer.vocab_size)
        decoder, adapter = _learning(base, model_config, config)
        neighbors = _neighbors(decoder, tokenizer, config, progress)
        data = _data(files, model_config, config, tokenizer)
        score = None if held_out is None else partial(held_out.loss, group=group, progress=progress)
        trainer = Trainer(config, decoder.to(device_of(config)), data, group, score, adapter)
    except MemlmError:  # a corpus that cannot be trained on leaves nothing behind, except checkpoints of earlier runs
        if group.is_main and not (work / CHECKPOINT_FILE).exists():
            shutil.rmtree(work)
            with contextlib.suppress(OSError):
                out.rmdir()
        raise
    tokens_per_s = trainer.run(work, progress)
    if group.is_main:
        if adapter is None or base is None:
            save_checkpoint(out, trainer.decoder.eval(), tokenizer)
        else:
            save_adapter(out, adapter, base)
        (work / METRICS_FILE).replace(out / METRICS_FILE)
        shutil.rmtree(work)
    if neighbors is not None:
        neighbors.close()
    group.destroy()
    return TrainReport(
        steps=len(trainer.records),
        tokens=len(trainer.records) * trainer.tokens_per_step,
        losses=tuple(trainer.losses),
        valid_loss=trainer.valid_loss,
        tokens_per_s=tokens_per_s,
        num_parameters=trainer.learning.num_parameters,
    )


def _check_cross(config: ModelConfig, settings: TrainConfig, *, has_tokenizer: bool) -> None:
    """Raises InvalidInput for a decoder that reads more than the documents of a corpus, without what it reads."""
    if config.reads_source:
        raise InvalidInput(
            "this decoder reads a source beside its text, and documents have none; choose the cross none", field="cross"
        )
    is_retro = config.cross is not None and config.cross.kind == "retro"
    if is_retro and not settings.chunk_store and not settings.adapter:
        raise InvalidInput(
            "the cross retro learns to read neighbors, and there are none; give a datastore as --chunk-store",
            field="chunk_store",
        )
    if settings.chunk_store and not is_retro:
        raise InvalidInput(
            "a chunk store is read by the cross retro, and this model has none; choose it, or leave chunk_store out",
            field="chunk_store",
        )
    if settings.chunk_store and not has_tokenizer:
        raise InvalidInput(
            "the chunk store has a tokenizer, and training would learn another; give its model as"
            " --init-from, or its folder as --tokenizer",
            field="tokenizer",
        )


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


def _neighbors(
    decoder: Decoder, tokenizer: Tokenizer, config: TrainConfig, progress: Progress
) -> DatastoreChunks | None:
    """Lets the decoder read chunks of the datastore, but none of a document that it learns from."""
    if not config.chunk_store:
        return None
    found = DatastoreChunks(config.chunk_store, decoder, tokenizer, leaves_out_own=True, progress=progress)
    decoder.cross.neighbors = found
    return found


def _domains(shape: ModelConfig, corpus: Corpus, config: TrainConfig, *, has_valid: bool) -> tuple[str, ...]:
    """The domains of a model with experts for them. Raises InvalidInput where the run does not fit them."""
    if not any(part.kind == "domain" for part in shape.parts):
        return ()
    from memlm.zoo.domains import domains_of

    names, rows = domains_of(shape), config.batch_size * config.accumulate
    if len(corpus.paths) != len(names) or corpus.documents:
        raise InvalidInput(
            f"the model has the domains {', '.join(names)}, and the corpus {len(corpus.paths)} paths; give a path for"
            " each, in this order",
            field="corpus",
        )
    if rows < len(names):
        raise InvalidInput(
            f"a step has {rows} rows for {len(names)} domains; give a batch_size of {len(names)} at least",
            field="batch_size",
        )
    if has_valid:
        raise InvalidInput(
            "held-out text has no domain; leave --valid out, and score with `memlm eval --domain`", field="valid"
        )
    return names


def _by_domain(corpus: Corpus, count: int) -> list[Corpus]:
    """The corpus of each domain."""
    return [corpus] if count == 1 else [replace(corpus, paths=[path]) for path in corpus.paths]


def _data(files: list[Path], shape: ModelConfig, config: TrainConfig, tokenizer: Tokenizer) -> TrainingData:
    """The batches of a run. Chunks that have neighbors belong to one document, as do those of a model with memory."""
    length, rows = shape.training_length, config.batch_size * config.accumulate
    ids = tokenizer.start_id, tokenizer.end_id
    if any(part.kind == "domain" for part in shape.parts):
        counts = [len(range(number, rows, len(files))) for number in range(len(files))]
        streams = (
            DocumentStreams(path, length, each, config.seed, *ids) for path, each in zip(files, counts, strict=True)
        )
        return DomainStreams(tuple(streams))
    if shape.is_segmented or config.chunk_store:
        return DocumentStreams(files[0], length, rows, config.seed, *ids)
    return Batches(files[0], length, rows, config.seed)


def loss_on(valid: Corpus, decoder: Decoder, tokenizer: Tokenizer) -> float:
    """Returns nats per token of held-out documents, each read with an empty memory."""
    return HeldOut(valid, tokenizer).loss(decoder)


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
