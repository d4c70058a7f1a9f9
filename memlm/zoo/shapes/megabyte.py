"""MEGABYTE: a global model over patches of bytes, and a local one within each patch (arXiv 2305.07185).

The global model reads of patch k the joined embeddings of the P bytes of patch k - 1, and a learned vector for the
first patch. Its output is cut into P vectors. Each is projected and added to the embedding of the byte before, or to a
learned vector at the start of a patch, and the local model reads them, within the patch alone:

    local_in_kp = W global_out_k[p D : (p + 1) D] + E[x_(kP + p - 1)]

Both models are ordinary decoders, of any parts. Bytes have no positions of their own: both models have theirs.

Shapes: B batch, T bytes, K patches, P bytes of a patch, D width of a byte in a patch, L width of the local model,
V values of a byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from memlm.errors import InvalidInput, check_range
from memlm.model import Decoder, ModelConfig
from memlm.model.exits import refuse_exits
from memlm.zoo.shapes.folders import load_folder, save_folder
from memlm.zoo.shapes.megabyte_state import MegabyteState

MODEL_TYPE = "memlm-megabyte"
NUM_BYTES = 256


@dataclass(frozen=True)
class MegabyteConfig:
    """The shape of a MEGABYTE model. Raises InvalidInput for fields that do not fit together.

    The width of `global_model` is `patch` times that of a byte in it. Its vocabulary is one vector, which it reads in
    the place of the patch before the first. `local_model` has the values of a byte as its vocabulary, and a context of
    two patches at least, because rows at other places of their patches are read side by side.
    """

    patch: int
    global_model: ModelConfig
    local_model: ModelConfig

    def __post_init__(self) -> None:
        check_range("patch", self.patch, least=1, whole=True)
        if self.global_model.dim % self.patch:
            raise InvalidInput(
                f"a global model {self.global_model.dim} wide does not divide into {self.patch} bytes", field="patch"
            )
        if self.global_model.vocab_size != 1:
            raise InvalidInput(
                f"the global model has a vocabulary of {self.global_model.vocab_size}; expected 1, the vector before"
                " the first patch",
                field="global_model.vocab_size",
            )
        if self.local_model.vocab_size != NUM_BYTES:
            raise InvalidInput(
                f"the local model has a vocabulary of {self.local_model.vocab_size}; expected {NUM_BYTES}, the values"
                " of a byte",
                field="local_model.vocab_size",
            )
        for name in ("global_model", "local_model"):
            refuse_exits(name, getattr(self, name))
        if self.local_model.context_length < 2 * self.patch:
            raise InvalidInput(
                f"the local model's context is {self.local_model.context_length}; expected two patches of {self.patch}"
                " bytes or more",
                field="local_model.context_length",
            )

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields in JSON's types."""
        models = {"global_model": self.global_model.as_dict(), "local_model": self.local_model.as_dict()}
        return {"patch": self.patch, **models}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> MegabyteConfig:
        """Returns the config of `as_dict`. Raises InvalidInput or TypeError for other fields."""
        models = {name: ModelConfig.from_dict(given[name]) for name in ("global_model", "local_model")}
        return cls(**{**given, **models})


class Megabyte(nn.Module):
    """A model of bytes. Seed torch before for reproducible parameters."""

    def __init__(self, config: MegabyteConfig) -> None:
        super().__init__()
        self.config = config
        self.global_model, self.local_model = Decoder(config.global_model), Decoder(config.local_model)
        D, L = config.global_model.dim // config.patch, config.local_model.dim
        self.embedding = nn.Embedding(config.local_model.vocab_size, D)  # of bytes in a patch
        self.to_local = nn.Linear(D, L, bias=False)
        self.start_L = nn.Parameter(torch.empty(L))
        for parameter in (self.embedding.weight, self.to_local.weight, self.start_L):
            nn.init.normal_(parameter, std=0.02)  # as the decoders' own tables

    def predict(self, bytes_BT: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Returns the scores of each byte of whole texts, from the bytes before it."""
        (B, T), P, bytes_BT = bytes_BT.shape, self.config.patch, bytes_BT.long()
        K, most = -(-T // P), self.config.global_model.max_length
        if most is not None and most < K:
            raise InvalidInput(f"{T} bytes do not fit into {most} patches of {P}; shorten the text", field="bytes_BT")
        bytes_BKP = F.pad(bytes_BT, (0, -T % P)).view(B, K, P)
        patches_BKG = torch.cat([self._first_patch(B), self.embedding(bytes_BKP[:, :-1]).flatten(2)], dim=1)
        vectors_BKPL = self._cut(self.global_model.read(patches_BKG)[0])
        earlier_NPL = self.local_model.token_vectors(bytes_BKP[:, :, :-1].flatten(0, 1))
        before_NPL = torch.cat([self.start_L.expand(B * K, 1, -1), earlier_NPL], dim=1)
        hidden_NPL, _ = self.local_model.read(vectors_BKPL.flatten(0, 1) + before_NPL)
        return self.local_model.logits(hidden_NPL.reshape(B, K * P, -1)[:, :T])

    def loss(self, bytes_BT: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        """Returns the cross-entropy in nats a byte, plus the losses of the models' parts."""
        loss = F.cross_entropy(self.predict(bytes_BT).flatten(0, 1).float(), bytes_BT.long().flatten())
        for told in (self.global_model.take_losses(), self.local_model.take_losses()):
            loss = loss if told is None else loss + told
        return loss

    def new_state(self, batch_size: int = 1, *, capacity: int | None = None) -> MegabyteState:
        """Returns the state of texts that have not begun, with room for `capacity` bytes (default: the context length
        of the global model in patches). Its `logits_BV` are the scores of the first byte.
        """
        P = self.config.patch
        state = MegabyteState(
            self.global_model.new_state(
                batch_size=batch_size, capacity=None if capacity is None else capacity // P + 1
            ),
            self.local_model.new_state(batch_size=batch_size, capacity=2 * P),
            torch.zeros(batch_size, P, dtype=torch.int64, device=self.start_L.device),
            self.start_L.new_zeros(batch_size, P, self.config.local_model.dim),
            self.start_L.new_zeros(batch_size, self.config.local_model.vocab_size),
        )
        self._begin(state, range(batch_size))
        return state

    def reset(self, state: MegabyteState, row: int) -> None:
        """Begins another text in a row."""
        state.of_patches.reset(row)
        state.of_bytes.reset(row)
        self._begin(state, [row])

    @torch.no_grad()
    def read(
        self, bytes_BT: Int[Tensor, "B T"], state: MegabyteState, *, new_B: list[int] | None = None
    ) -> Float[Tensor, "B T V"]:
        """Reads bytes after those in a state, and returns the scores of the byte behind each. The state is updated.

        `new_B` counts the bytes of each row that are text. The others are padding behind them. Rows may be at any
        place of their patch. A byte takes a step of the local model, and the last one of a patch a step of the global
        model too. Raises InvalidInput for bytes that do not fit behind those in the state.
        """
        (B, T), P, bytes_BT = bytes_BT.shape, self.config.patch, bytes_BT.long()
        new_B = [T] * B if new_B is None else new_B
        place_B = state.places_B
        bytes_BS = torch.zeros(B, 2 * P + T, dtype=torch.int64, device=bytes_BT.device)  # from the patch's begin on
        for row, (place, new) in enumerate(zip(place_B, new_B, strict=True)):
            bytes_BS[row, :place] = state.bytes_BP[row, :place]
            bytes_BS[row, place : place + new] = bytes_BT[row, :new]
        full_B = [(place + new) // P for place, new in zip(place_B, new_B, strict=True)]
        room, row = state.of_patches.room(), full_B.index(max(full_B))
        if room is not None and room < full_B[row]:
            left = P * (room + 1) - 1 - place_B[row]
            raise InvalidInput(
                f"{new_B[row]} bytes do not fit into the places left, {left} bytes; shorten the text", field="prompt"
            )
        vectors_BSL = state.vectors_BPL
        if full := max(full_B):
            patches_BKG = self.embedding(bytes_BS[:, : full * P].view(B, full, P)).flatten(2)
            made_BKG, _ = self.global_model.read(patches_BKG, state.of_patches, new_B=full_B)
            vectors_BSL = torch.cat([vectors_BSL, self._cut(made_BKG).flatten(1, 2)], dim=1)
        # Byte s of the current patch is read at place s + 1, perhaps in the next patch.
        slot_BT = torch.tensor(place_B, device=bytes_BT.device)[:, None] + torch.arange(
            1, T + 1, device=bytes_BT.device
        )
        slot_BT = slot_BT.clamp(max=vectors_BSL.shape[1] - 1)  # padding
        inputs_BTL = vectors_BSL.gather(1, slot_BT[:, :, None].expand(-1, -1, vectors_BSL.shape[2]))
        is_start_BT1 = (slot_BT % P == 0)[:, :, None]
        inputs_BTL = inputs_BTL + torch.where(is_start_BT1, self.start_L, self.local_model.token_vectors(bytes_BT))
        hidden_BTL = self._read_patches(inputs_BTL, state, place_B, new_B)
        logits_BTV = self.local_model.logits(hidden_BTL)
        for row, (full, new) in enumerate(zip(full_B, new_B, strict=True)):
            state.bytes_BP[row] = bytes_BS[row, full * P : full * P + P]
            state.vectors_BPL[row] = vectors_BSL[row, full * P : full * P + P]
            if new:
                state.logits_BV[row] = logits_BTV[row, new - 1]
        return logits_BTV

    @torch.inference_mode()
    def generate(
        self,
        prompt: bytes = b"",
        *,
        num_bytes: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        state: MegabyteState | None = None,
    ) -> bytes:
        """Returns `num_bytes` bytes that follow a prompt, drawn by `generator`, or the likeliest at a temperature of 0.

        With a state of one row, the prompt follows its text, and the state goes on behind the returned bytes. Raises
        InvalidInput for a text that does not fit.
        """
        check_range("num_bytes", num_bytes, least=0, whole=True)
        check_range("temperature", temperature, least=0)
        state = self.new_state(capacity=len(prompt) + num_bytes) if state is None else state
        device = state.bytes_BP.device
        if prompt:
            self.read(torch.tensor([list(prompt)], device=device), state)
        made = bytearray()
        for _ in range(num_bytes):
            if temperature:
                shares_1V = (state.logits_BV.float() / temperature).softmax(dim=1)
                next_11 = torch.multinomial(shares_1V, 1, generator=generator)
            else:
                next_11 = state.logits_BV.argmax(dim=1, keepdim=True)
            made.append(int(next_11))
            self.read(next_11, state)
        return bytes(made)

    def save(self, folder: str | Path) -> None:
        """Writes config.json and model.safetensors into a folder."""
        save_folder(folder, self, MODEL_TYPE, self.config.as_dict())

    @classmethod
    def load(cls, folder: str | Path) -> Megabyte:
        """Reads the folder of `save`. Raises NotFound, Incompatible or Corrupt for any other."""
        return load_folder(folder, MODEL_TYPE, lambda given: cls(MegabyteConfig.from_dict(given)))

    def _first_patch(self, B: int) -> Float[Tensor, "B 1 G"]:
        return self.global_model.token_vectors(torch.zeros(B, 1, dtype=torch.int64, device=self.start_L.device))

    def _cut(self, made_BKG: Tensor) -> Float[Tensor, "B K P L"]:
        """Returns the vectors of the bytes in each patch, from the outputs of the global model."""
        return self.to_local(made_BKG.unflatten(2, (self.config.patch, -1)))

    @torch.no_grad()
    def _begin(self, state: MegabyteState, rows: Iterable[int]) -> None:
        """Reads the learned vectors before the first byte of some empty rows."""
        B = len(state.of_patches.rows)
        new_B = [int(row in rows) for row in range(B)]
        made_B1G, _ = self.global_model.read(self._first_patch(B), state.of_patches, new_B=new_B)
        vectors_BPL = self._cut(made_B1G)[:, 0]
        hidden_B1L, _ = self.local_model.read(vectors_BPL[:, :1] + self.start_L, state.of_bytes, new_B=new_B)
        logits_BV = self.local_model.logits(hidden_B1L)[:, 0]
        for row in rows:
            state.vectors_BPL[row], state.logits_BV[row] = vectors_BPL[row], logits_BV[row]

    def _read_patches(
        self, inputs_BTL: Tensor, state: MegabyteState, place_B: list[int], new_B: list[int]
    ) -> Float[Tensor, "B T L"]:
        """Reads the vectors of each row by the local model, which begins anew at each patch.

        All patches are read side by side. The state keeps the last one of each row.
        """
        P = self.config.patch
        runs = [run for row in range(len(new_B)) for run in _runs(row, place_B[row], new_B[row], P)]
        if len({run.row for run in runs}) == len(runs):  # one run a row, as in a step of decoding
            for run in runs:
                if not run.goes_on:
                    state.of_bytes.reset(run.row)
            most = max(1, *new_B)
            hidden_BTL, _ = self.local_model.read(inputs_BTL[:, :most], state.of_bytes, new_B=new_B)
            return F.pad(hidden_BTL, (0, 0, 0, inputs_BTL.shape[1] - most))
        beside = self.local_model.new_state(batch_size=len(runs), capacity=2 * P)
        inputs_NPL = inputs_BTL.new_zeros(len(runs), P, inputs_BTL.shape[2])
        for number, run in enumerate(runs):
            inputs_NPL[number, : run.length] = inputs_BTL[run.row, run.begin : run.begin + run.length]
            if run.goes_on:
                beside.copy_row(number, state.of_bytes, run.row)
        most = max(run.length for run in runs)
        hidden_NPL, _ = self.local_model.read(inputs_NPL[:, :most], beside, new_B=[run.length for run in runs])
        hidden_BTL = torch.zeros_like(inputs_BTL)
        for number, run in enumerate(runs):  # the last run of a row comes last
            hidden_BTL[run.row, run.begin : run.begin + run.length] = hidden_NPL[number, : run.length]
            if number + 1 == len(runs) or runs[number + 1].row != run.row:
                state.of_bytes.copy_row(run.row, beside, number)
        return hidden_BTL


class _Run(NamedTuple):
    """New vectors of a row that lie in one patch: the first of them, how many, whether the patch had begun before."""

    row: int
    begin: int
    length: int
    goes_on: bool


def _runs(row: int, place: int, new: int, patch: int) -> list[_Run]:
    """Returns the runs of a row that has read `place` bytes of its patch. Behind the last byte, the next one begins."""
    runs, begin, left = list[_Run](), 0, patch - 1 - place
    while begin < new:
        if left:
            runs.append(_Run(row, begin, min(left, new - begin), goes_on=left < patch))
            begin += runs[-1].length
        left = patch
    return runs
