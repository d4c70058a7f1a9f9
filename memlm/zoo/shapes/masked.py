"""Masked language modelling: an encoder learns to guess tokens that were hidden from it (BERT, arXiv 1810.04805).

15 % of the tokens of a text are chosen, anew in each pass (RoBERTa, 1907.11692). Of these 80 % become the mask token,
10 % another token, and 10 % stay. The loss counts the chosen tokens only.

Shapes: B batch, T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from memlm.data.encoder_tokenizer import EncoderTokenizer
from memlm.errors import InvalidInput, check_range
from memlm.model.files.encoder_files import padded
from memlm.model.text_encoder import TextEncoder
from memlm.zoo.shapes.fitting import fit


@dataclass(frozen=True)
class Masking:
    """Which tokens are chosen, and what becomes of them. `special_ids` are never chosen, and never a replacement."""

    mask_id: int
    vocab_size: int
    special_ids: frozenset[int] = frozenset()
    share: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    _ordinary: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("share", "mask_share", "random_share"):
            check_range(name, getattr(self, name), least=0, most=1)
        ordinary = [token for token in range(self.vocab_size) if token not in self.special_ids]
        object.__setattr__(self, "_ordinary", torch.tensor(ordinary))

    @classmethod
    def of(cls, tokenizer: EncoderTokenizer) -> Masking:
        """The published shares, for a tokenizer with a mask token. Raises Incompatible for one without."""
        return cls(tokenizer.mask_id, tokenizer.vocab_size, tokenizer.special_ids)

    def hide(
        self, tokens_BT: Int[Tensor, "B T"], new_B: list[int], generator: torch.Generator
    ) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Returns the tokens with some of them hidden, and which were chosen. Padding never is."""
        is_text_BT = torch.arange(tokens_BT.shape[1]) < torch.tensor(new_B)[:, None]
        special = torch.tensor(sorted(self.special_ids), dtype=tokens_BT.dtype)
        chosen_BT = torch.rand(tokens_BT.shape, generator=generator) < self.share
        chosen_BT &= is_text_BT & ~torch.isin(tokens_BT, special)
        fate_BT = torch.rand(tokens_BT.shape, generator=generator)
        others_BT = self._ordinary[torch.randint(len(self._ordinary), tokens_BT.shape, generator=generator)]
        is_masked_BT = chosen_BT & (fate_BT < self.mask_share)
        is_other_BT = chosen_BT & ~is_masked_BT & (fate_BT < self.mask_share + self.random_share)
        hidden_BT = torch.where(is_other_BT, others_BT, tokens_BT).masked_fill(is_masked_BT, self.mask_id)
        return hidden_BT, chosen_BT


def masked_loss(
    encoder: TextEncoder,
    inputs_BT: Int[Tensor, "B T"],
    tokens_BT: Int[Tensor, "B T"],
    chosen_BT: Bool[Tensor, "B T"],
    new_B: list[int],
) -> Float[Tensor, ""]:
    """Returns the mean of -log p of the chosen tokens, in nats, 0 where none was chosen."""
    hidden_ND = encoder(inputs_BT, new_B)[chosen_BT]
    if not len(hidden_ND):
        return hidden_ND.sum()
    return F.cross_entropy(encoder.logits(hidden_ND).float(), tokens_BT[chosen_BT].to(hidden_ND.device))


def learn_masked(
    encoder: TextEncoder,
    tokenizer: EncoderTokenizer,
    texts: Sequence[str],
    *,
    num_steps: int,
    batch_size: int = 16,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> list[float]:
    """Trains an encoder with a head on texts, of which the begin counts that it has places for. Returns the loss of
    each step, in nats a chosen token.

    The optimizer is that of `fit`. Raises InvalidInput for an encoder without a head, and for no text.
    """
    if encoder.head is None or not texts:
        raise InvalidInput("an encoder learns from at least one text, and needs a head; got none", field="texts")
    rows = tokenizer.encode(texts, most=encoder.config.context_length)
    masking, generator = Masking.of(tokenizer), torch.Generator().manual_seed(seed)

    def loss_of(step: int) -> Tensor:
        drawn = torch.randint(len(rows), (batch_size,), generator=generator).tolist()
        tokens_BT, new_B = padded([rows[place] for place in drawn])
        inputs_BT, chosen_BT = masking.hide(tokens_BT, new_B, generator)
        return masked_loss(encoder, inputs_BT, tokens_BT, chosen_BT, new_B)

    return fit(encoder, loss_of, num_steps=num_steps, learning_rate=learning_rate)
