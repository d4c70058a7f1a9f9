"""The state of a MEGABYTE model: the states of both decoders, and the current patch of each text.

Shapes: B rows, P bytes of a patch, L width of the local model, V values of a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from memlm.errors import Corrupt, Incompatible
from memlm.model import DecoderState
from memlm.model.files.tensor_bytes import safetensors_pieces

if TYPE_CHECKING:
    from memlm.zoo.shapes.megabyte import MegabyteConfig

STATES, TENSORS = ("of_patches", "of_bytes"), ("bytes_BP", "vectors_BPL", "logits_BV")


@dataclass
class MegabyteState:
    """The texts of some rows, as `Megabyte.new_state` begins them.

    `of_patches` is the state of the global model. `of_bytes` is that of the local one, in the current patch.
    `bytes_BP` are the bytes of the patch so far, `vectors_BPL` the vectors that the global model made for its places,
    and `logits_BV` the scores of the next byte.
    """

    of_patches: DecoderState
    of_bytes: DecoderState
    bytes_BP: Int[Tensor, "B P"]
    vectors_BPL: Float[Tensor, "B P L"]
    logits_BV: Float[Tensor, "B V"]

    @property
    def places_B(self) -> list[int]:
        """How many bytes of its current patch each row has read, fewer than P."""
        return [row.length - 1 for row in self.of_bytes.rows]

    @property
    def lengths_B(self) -> list[int]:
        """How many bytes each row has read."""
        P = self.bytes_BP.shape[1]
        patches_B = (row.length - 1 for row in self.of_patches.rows)
        return [P * patches + place for patches, place in zip(patches_B, self.places_B, strict=True)]

    @property
    def num_bytes(self) -> int:
        """Bytes of memory of all rows, as reserved."""
        own = sum(getattr(self, name).nbytes for name in TENSORS)
        return own + self.of_patches.num_bytes + self.of_bytes.num_bytes

    def copy_row(self, row: int, source: MegabyteState, source_row: int) -> None:
        """Overwrites a row with one of a state of the same model."""
        for name in STATES:
            getattr(self, name).copy_row(row, getattr(source, name), source_row)
        for name in TENSORS:
            getattr(self, name)[row] = getattr(source, name)[source_row]

    def fork(self) -> MegabyteState:
        """Returns an independent copy."""
        return MegabyteState(
            self.of_patches.fork(), self.of_bytes.fork(), self.bytes_BP.clone(), self.vectors_BPL.clone(),
            self.logits_BV.clone(),
        )  # fmt: skip

    def save(self) -> bytes:
        """Returns the state as bytes for `restore` with an equal config."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        for name in STATES:
            tensors[name] = torch.frombuffer(bytearray(getattr(self, name).save()), dtype=torch.uint8)
        return b"".join(safetensors_pieces(tensors, {}))

    @classmethod
    def restore(cls, data: bytes, config: MegabyteConfig, *, device: torch.device | str = "cpu") -> MegabyteState:
        """Loads the bytes of `save` on a device.

        Raises Incompatible for the state of a model of another shape, Corrupt for other bytes.
        """
        try:
            tensors = load(data)
            states = [tensors[name].numpy().tobytes() for name in STATES]
            own = [tensors[name].to(device) for name in TENSORS]
        except (SafetensorError, KeyError) as error:
            raise Corrupt(f"this is no saved state ({error}); read the text anew") from error
        of_patches = DecoderState.restore(states[0], config.global_model, device=device)
        of_bytes = DecoderState.restore(states[1], config.local_model, device=device)
        if own[0].shape[1] != config.patch:
            raise Incompatible(
                f"the state was saved with patches of {own[0].shape[1]} bytes; this model has {config.patch}"
            )
        return cls(of_patches, of_bytes, *own)
