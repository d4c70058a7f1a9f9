"""The table of token embeddings, in memory or in the model's file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class FileTable:
    """A table that stays in its file, in the file's type: `read` returns some rows, and `whole` all of them."""

    read: Callable[[Tensor], Tensor]
    num_rows: int

    def whole(self) -> Tensor:
        return self.read(torch.arange(self.num_rows))


class Embedding(nn.Embedding):
    """Rows of a table. Those of a table in a file are converted to the model's type when they are looked up.

    A converted table would take as much RAM again as the head's packed copy of it.
    """

    in_file: FileTable | None = None

    def leave_in_file(self, table: FileTable, dtype: torch.dtype) -> None:
        """Looks rows up in a table that is not in memory. `weight` is empty from then on."""
        self.in_file = table
        self.weight = nn.Parameter(torch.empty(0, self.embedding_dim, dtype=dtype), requires_grad=False)

    @property
    def table_VD(self) -> Float[Tensor, "V D"]:
        """The whole table in the model's type."""
        return self.weight if self.in_file is None else self.in_file.whole().to(self.weight.dtype)

    def forward(self, ids: Int[Tensor, "*P"]) -> Float[Tensor, "*P D"]:
        """Returns the rows of some tokens."""
        return super().forward(ids) if self.in_file is None else self.in_file.read(ids).to(self.weight.dtype)
