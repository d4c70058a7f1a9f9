"""The parts of the decoder side by side: one small model each, of equal parameters, on one text and one machine.

A variant is a change of the plain config. Its feed-forward gets the width with which as many parameters meet a token as
in the plain model. Every variant learns for equal seconds, and is scored on held-out text at the end and at equal
numbers of tokens. Decoding starts from states that are filled to a length. Plain runs come first, in the middle and
last: their spread is the error of the table.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from memlm.base.progress import Progress
from memlm.bench.filled import decode_speed, filled_state, room_for
from memlm.data.corpus import Corpus, Document
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.model import Decoder, ModelConfig
from memlm.model.experts import ExpertFeedForwards
from memlm.training.config import PRESETS, TrainConfig
from memlm.training.data import Batches, DocumentStreams, TrainingData, write_tokens
from memlm.training.distributed import ProcessGroup, device_of
from memlm.training.trainer import Trainer
from memlm.training.validation import HeldOut

SHAPE: dict[str, Any] = {
    "dim": 192, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "ff_dim": 512, "context_length": 256,
}  # fmt: skip
PLAIN, AGAIN = "plain", ("plain again", "plain at last")


def _mixer(kind: str, **fields: Any) -> dict[str, Any]:
    return {"layers": [{"mixer": {"kind": kind, **fields}}]}


def _channel(kind: str, **fields: Any) -> dict[str, Any]:
    return {"layers": [{"channel": {"kind": kind, **fields}}]}


# In a variant with memory a segment has `context_length` tokens: as many as others see at once.
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "window": {"windows": (128,) * 4},
    "strided": _mixer("pattern", rule="strided", stride=16),
    "fixed": _mixer("pattern", rule="fixed", block=32, summary=4),
    "dilated": {
        "layers": [
            {"mixer": {"kind": "pattern", "rule": "dilated", "window": 32, "dilation": dilation}}
            for dilation in (1, 2, 4, 8)
        ]
    },
    "global": _mixer("pattern", rule="global", window=64, num_global=4),
    "random": _mixer("pattern", rule="random", window=64, block=16, num_global=4, num_random=2),
    "blocks": _mixer("pattern", rule="blocks", block=64),
    "xl": {"xl_length": 256},
    "compressive": {"xl_length": 128, "compression": {"length": 128, "rate": 2}},
    "linformer": {"xl_length": 128, "compression": {"length": 128, "rate": 2, "kind": "linear"}},
    "memorizing": {"xl_length": 128, "memorizing": {"layers": [2], "capacity": 65_536}},
    "recurrent_memory": {"border": {"kind": "recurrent_memory", "memories": 8}},
    "infinite": {**_mixer("infinite"), "xl_length": 128},
    "performer": _mixer("performer"),
    "rfa": _mixer("rfa"),
    "differential": _mixer("differential"),
    "differential_v2": {**_mixer("differential_v2"), "num_heads": 8, "head_dim": 48},
    "lsh": _mixer("lsh"),
    "routing": _mixer("routing"),
    "hyper": _mixer("hyper"),
    "selective": _mixer("selective"),
    "adaptive_span": _mixer("adaptive_span"),
    "simplified": {**_mixer("shaped"), "join": "skipless"},
    "reversible": {"stack": "reversible"},
    "switch": _channel("switch", experts=4),
    "experts": _channel("experts", experts=8, top=2, expert_dim=256),
    "hash": _channel("hash", experts=4),
    "gated": {"join": "gated", "dim": 96},  # its gates alone have more parameters than the plain model
    "dense": {"stack": "dense"},
    "universal": {"stack": "universal"},
    "looped": {"stack": "looped"},
}
APPROXIMATE = {"hyper"}  # computes less than attention to all places
SIZES = (1_000, 8_000, 64_000)  # tokens before those that are decoded
MARKS = (0.25, 0.5)  # shares of the first plain run's tokens, at which all are scored
LEARNING = 0.6  # share of a row's time
SPEED = 0.05  # share of a row's time at each size
HELD_OUT_BYTES = 50_000
WARMUP_STEPS = 50
BUSY = 0.05  # a run whose halves differ by more in speed was disturbed


@dataclass(frozen=True, slots=True)
class Texts:
    """A tokenized corpus, held-out documents, and the settings of a run."""

    tokens: Path
    tokenizer: Tokenizer
    held_out: HeldOut
    held_out_tokens: int
    held_out_bytes: int
    settings: TrainConfig

    def data(self, config: ModelConfig) -> TrainingData:
        """The batches of a variant."""
        length, rows, seed = config.training_length, self.settings.batch_size, self.settings.seed
        if config.is_segmented:
            ids = self.tokenizer.start_id, self.tokenizer.end_id
            return DocumentStreams(self.tokens, length, rows, seed, *ids)
        return Batches(self.tokens, length, rows, seed)

    def bits_a_byte(self, decoder: Decoder) -> float:
        """Scores the held-out text."""
        nats = self.held_out.loss(decoder) * self.held_out_tokens
        return nats / math.log(2) / self.held_out_bytes


@dataclass(frozen=True, slots=True)
class Curve:
    """The course of one run. `bits` has bits a byte at the marks that were reached, by tokens, and those at the end."""

    tokens: int
    tokens_per_s: float
    drift: float
    bits: Mapping[int, float]
    final_bits: float


def bench_variants(
    texts: Corpus, *, minutes: float, only: Iterable[str], device: str, progress: Progress
) -> dict[str, Any]:
    """Returns a row for each variant, and the spread of three plain runs. Takes about `minutes`.

    Raises InvalidInput for an unknown variant, a text that is too short, and a machine without the device.
    """
    order, settings = plan(chosen_variants(only)), _settings(device)
    seconds = 60 * minutes / len(order)
    rows, errors, marks = list[dict[str, Any]](), dict[str, str](), tuple[int, ...]()
    with TemporaryDirectory(prefix="memlm-bench-") as folder:
        prepared = prepare(texts, Path(folder), settings)
        for number, name in enumerate(order):
            progress("variants", number, len(order), name)
            try:
                row, curve = measure(name, prepared, seconds, marks)
            except (RuntimeError, ValueError) as error:  # as of a device without memory: the others keep their rows
                if name == PLAIN:
                    raise
                errors[name] = f"{type(error).__name__}: {error}"
                continue
            marks = marks or tuple(int(share * curve.tokens) for share in MARKS)
            rows.append(row)
        progress("variants", len(order), len(order))
    plain = [row["bits_a_byte"] for row in rows if row["way"] in (PLAIN, *AGAIN)]
    spread = max(plain) - min(plain)
    for row in rows:
        row["equals_plain"] = int(abs(row["bits_a_byte"] - statistics.mean(plain)) <= 2 * spread)
    return {
        "device": device, "seconds_a_row": seconds, "marks": list(marks), "held_out_bytes": prepared.held_out_bytes,
        "spread_of_plain": spread, "errors": errors, "rows": rows,
    }  # fmt: skip


def chosen_variants(only: Iterable[str]) -> list[str]:
    """Returns the names of some variants, or of all, in the order of the table, without the plain one."""
    wanted = set(only)
    if unknown := sorted(wanted - VARIANTS.keys()):
        raise InvalidInput(f"{unknown[0]!r} is no variant; expected some of {', '.join(VARIANTS)}", field="only")
    return [name for name in VARIANTS if name != PLAIN and (not wanted or name in wanted)]


def plan(names: list[str]) -> list[str]:
    """The order of the runs: the plain model first, in the middle and last."""
    middle = len(names) // 2
    return [PLAIN, *names[:middle], AGAIN[0], *names[middle:], AGAIN[1]]


def prepare(texts: Corpus, folder: Path, settings: TrainConfig) -> Texts:
    """Tokenizes a corpus. Every tenth document is held out, as far as HELD_OUT_BYTES."""
    documents = list(texts)
    held, left = held_out_of(documents)
    tokenizer = Tokenizer.train((document.text for document in left), vocab_size=settings.vocab_size)
    path = folder / "tokens.u32"
    write_tokens(left, tokenizer, path, num_bytes=sum(document.num_bytes for document in left))
    tokens = sum(len(tokenizer.encode(document.text)) for document in held)
    num_bytes = sum(len(document.text.encode()) for document in held)
    return Texts(path, tokenizer, HeldOut(held, tokenizer), tokens, num_bytes, settings)


def held_out_of(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Returns every tenth document, as far as HELD_OUT_BYTES, and the others. Raises InvalidInput for too few."""
    held, left, size = list[Document](), list[Document](), 0
    for number, document in enumerate(documents):
        if number % 10 == 5 and size < HELD_OUT_BYTES and document.text:
            held.append(document)
            size += document.num_bytes
        else:
            left.append(document)
    if not held:
        raise InvalidInput(
            f"the corpus has {len(documents)} documents; give six at least, of which one is held out", field="corpus"
        )
    return held, left


def measure(name: str, texts: Texts, seconds: float, marks: tuple[int, ...]) -> tuple[dict[str, Any], Curve]:
    """Returns the row of a variant, and the course of its learning."""
    device = device_of(texts.settings)
    patch = VARIANTS.get(name, {})  # plain runs come again under other names
    config = variant(patch, texts.tokenizer.vocab_size)
    torch.manual_seed(texts.settings.seed)
    decoder = Decoder(config).to(device)
    curve = learn_text(decoder, texts, LEARNING * seconds, marks)
    row: dict[str, Any] = {
        "way": name, "bits_a_byte": curve.final_bits, "tokens_read": curve.tokens,
        "train_tokens_per_s": curve.tokens_per_s, "drift": curve.drift, "disturbed": int(abs(curve.drift) > BUSY),
        "active_parameters": active_parameters(decoder), "all_parameters": decoder.num_parameters,
        "ff_dim": config.ff_dim,
        "exactness": "none" if name in APPROXIMATE else _exactness(config),
    }  # fmt: skip
    row |= {
        f"bits_a_byte_at_mark_{number}": curve.bits[mark] for number, mark in enumerate(marks) if mark in curve.bits
    }
    if name not in AGAIN:
        row |= speeds(config, device, SPEED * seconds)
    return row, curve


def variant(patch: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    """Returns the config of a variant, with as many parameters a token as the plain one."""
    plain = ModelConfig.from_dict({**SHAPE, "vocab_size": vocab_size})
    config = ModelConfig.from_dict({**SHAPE, "vocab_size": vocab_size, **patch})
    return solve_ff(config, active_parameters(Decoder(plain)))


def active_parameters(decoder: Decoder) -> int:
    """Parameters that a token meets: all but those of experts that are not its own."""
    idle = sum(module.num_idle_parameters for module in decoder.modules() if isinstance(module, ExpertFeedForwards))
    return decoder.num_parameters - idle


def solve_ff(config: ModelConfig, count: int) -> ModelConfig:
    """Returns the config with the `ff_dim` whose active parameters are nearest to a count. They grow linearly with it.

    A config whose parameters do not depend on `ff_dim` stays as it is. Raises InvalidInput where no width is small
    enough.
    """
    narrow, wide = (active_parameters(Decoder(replace(config, ff_dim=ff_dim))) for ff_dim in (64, 128))
    if wide == narrow:
        return config
    ff_dim = 64 + round((count - narrow) / ((wide - narrow) / 64))
    if ff_dim < 1:
        raise InvalidInput(f"the rest of the model has more than {count:,} parameters", field="ff_dim")
    return replace(config, ff_dim=ff_dim)


def learn_text(decoder: Decoder, texts: Texts, seconds: float, marks: tuple[int, ...]) -> Curve:
    """Trains for some seconds, without those of scoring."""
    trainer = Trainer(texts.settings, decoder, texts.data(decoder.config), ProcessGroup())
    trainer.num_steps = WARMUP_STEPS * int(1 / texts.settings.warmup)
    bits, spent, times = dict[int, float](), 0.0, list[float]()
    trainer.step()  # allocates
    while spent < seconds:
        begin = time.perf_counter()
        trainer.step()
        times.append(time.perf_counter() - begin)
        spent += times[-1]
        tokens = len(times) * trainer.tokens_per_step
        for mark in marks:
            if mark not in bits and tokens >= mark:
                bits[mark] = texts.bits_a_byte(decoder)
    half = len(times) // 2
    first, second = (statistics.median(part) if part else math.nan for part in (times[:half], times[half:]))
    return Curve(
        tokens=len(times) * trainer.tokens_per_step,
        tokens_per_s=trainer.tokens_per_step / statistics.median(times),
        drift=second / first - 1 if half else 0.0,
        bits=bits,
        final_bits=texts.bits_a_byte(decoder.eval()),
    )


def speeds(config: ModelConfig, device: torch.device, seconds: float) -> dict[str, Any]:
    """Tokens/s of one row's decoding behind filled states, their bytes, and their growth between the last sizes."""
    row, held = dict[str, Any](), list[int]()
    for size in SIZES:
        decoder = Decoder(room_for(config, size)).to(device).eval()
        if device.type == "cpu":
            decoder.pack()
        state = filled_state(decoder, size)
        row[f"decode_tokens_per_s_at_{size}"] = decode_speed(decoder, state, seconds)
        held.append(state.num_bytes)
    row["state_bytes_at_64000"] = held[-1]
    row["state_bytes_a_token"] = (held[-1] - held[-2]) / (SIZES[-1] - SIZES[-2])
    return row


def _exactness(config: ModelConfig) -> str:
    return "bit" if all(part.is_exact for part in config.parts) else "rounding"


def _settings(device: str) -> TrainConfig:
    """The tiny preset's training, with larger batches on a GPU, whose steps take as long with more rows."""
    settings = replace(PRESETS["tiny"], schedule="constant", device=device)
    return replace(settings, batch_size=32) if device_of(settings).type == "cuda" else settings
