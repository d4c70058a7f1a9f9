"""Two streams whose layers can be taken back, so that training keeps no layer's numbers.

RevNets (arXiv 1707.04585) and Reformer (2001.04451, section 3): y1 = x1 + attention(x2), y2 = x2 + ff(y1), and back
x2 = y2 - ff(y1), x1 = y1 - attention(x2).

Shapes: B batch, T new tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memlm.errors import InvalidInput
from memlm.model.attention.knn_attention import exact
from memlm.model.kernels.linear import Linear
from memlm.model.parts import Part

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig
    from memlm.model.forward import ForwardContext
    from memlm.model.layers import Block


@dataclass(frozen=True, slots=True)
class Reversible(Part):
    """A stack with two streams, both the embedding at first. The final stream is their mean.

    A backward pass computes each layer's inputs from its outputs, and needs the memory of one layer in place of all. It
    takes another forward pass. Passes with a state, as those of models with memory, and passes with adapters keep all
    numbers as usual. The streams have float32 or more, since their rounding adds up on the way back.
    """

    seam: ClassVar[str] = "stack"
    kind: ClassVar[str] = "reversible"

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> ReversibleStack:
        """Returns the loop. Has no parameters."""
        return ReversibleStack()

    def check(self, config: ModelConfig) -> None:
        """Refuses sub-layers that do not add to one stream what they read from the other."""
        if config.norm_order != "pre" or config.parallel_residual or config.join or config.cross:
            raise InvalidInput(
                "reversible layers need norm_order pre, no parallel residual, the join add and the cross none",
                field="stack",
            )


class ReversibleStack(nn.Module):
    """The loop over the layers."""

    def read(
        self, blocks: Sequence[Block], hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext, *, finishes: bool
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Returns the mean of the streams, and the keys."""
        first_BTD = second_BTD = exact(hidden_BTD)
        learns = torch.is_grad_enabled() and hidden_BTD.requires_grad
        if learns and context.state is None and finishes and not _have_adapters(blocks):
            names = list[str]()
            first_BTD, second_BTD, *told = _TakenBack.apply(first_BTD, second_BTD, blocks, context, names)
            for name, loss in zip(names, told, strict=True):
                context.tell(name, loss)
            key_BTD = blocks[-1].ff_norm(first_BTD.to(context.dtype))
        else:
            for block in blocks:
                first_BTD = first_BTD + mix(block, second_BTD, context)
                key_BTD = block.ff_norm(first_BTD.to(context.dtype))
                if finishes or block is not blocks[-1]:
                    second_BTD = second_BTD + block.ff(key_BTD, context)
        return ((first_BTD + second_BTD) / 2).to(hidden_BTD.dtype), key_BTD


def mix(block: Block, second_BTD: Tensor, context: ForwardContext) -> Tensor:
    """Returns the change of the first stream."""
    return block.attention(block.attention_norm(second_BTD.to(context.dtype)), context)


def change(block: Block, first_BTD: Tensor, context: ForwardContext) -> Tensor:
    """Returns the change of the second stream."""
    return block.ff(block.ff_norm(first_BTD.to(context.dtype)), context)


class _TakenBack(torch.autograd.Function):
    """All layers, of which only the final streams are kept.

    The backward pass adds to the gradients of all parameters that the layers use. It would read them without the
    adapters of the pass, so passes with adapters do not come here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        first_BTD: Tensor,
        second_BTD: Tensor,
        blocks: Sequence[Block],
        context: ForwardContext,
        names: list[str],
    ) -> tuple[Tensor, ...]:
        losses = dict[str, Tensor]()
        for block in blocks:
            first_BTD = first_BTD + mix(block, second_BTD, _anew(context, losses))
            second_BTD = second_BTD + change(block, first_BTD, _anew(context, losses))
        ctx.save_for_backward(first_BTD, second_BTD)
        ctx.blocks, ctx.context, ctx.names = blocks, context, names
        device = first_BTD.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        names += losses
        return first_BTD, second_BTD, *losses.values()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_first_BTD: Tensor, of_second_BTD: Tensor, *of_told: Tensor) -> tuple[Tensor | None, ...]:
        first_BTD, second_BTD = ctx.saved_tensors
        of_losses = dict(zip(ctx.names, of_told, strict=True))
        for block in reversed(ctx.blocks):
            changed_BTD, slope_BTD = _again(ctx, change, block, first_BTD, of_second_BTD, of_losses)
            second_BTD, of_first_BTD = second_BTD - changed_BTD, of_first_BTD + slope_BTD
            mixed_BTD, slope_BTD = _again(ctx, mix, block, second_BTD, of_first_BTD, of_losses)
            first_BTD, of_second_BTD = first_BTD - mixed_BTD, of_second_BTD + slope_BTD
        return of_first_BTD, of_second_BTD, None, None, None


def _have_adapters(blocks: Sequence[Block]) -> bool:
    linears = (module for block in blocks for module in block.modules() if isinstance(module, Linear))
    return any(linear.adapters is not None and linear.adapters.are_used for linear in linears)


def _anew(context: ForwardContext, losses: dict[str, Tensor]) -> ForwardContext:
    """Returns a context without tensors that an earlier computation cached. Its losses are not shared out by pieces."""
    return replace(context, losses=None if context.losses is None else losses, share=1.0, shared={})


def _again(
    ctx: Any, part: Any, block: Block, stream_BTD: Tensor, of_made_BTD: Tensor, of_losses: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Computes one sub-layer and its gradients. Returns its output and the slope of its input."""
    losses, (device, dtype, enabled) = dict[str, Tensor](), ctx.autocast
    read_BTD = stream_BTD.detach().requires_grad_()
    with torch.enable_grad(), torch.autocast(device, dtype, enabled=enabled):
        made_BTD = part(block, read_BTD, _anew(ctx.context, losses))
    told = {name: loss for name, loss in losses.items() if loss.requires_grad}
    torch.autograd.backward(
        [made_BTD, *told.values()], [of_made_BTD.to(made_BTD.dtype), *(of_losses[name] for name in told)]
    )
    assert read_BTD.grad is not None
    return made_BTD.detach(), read_BTD.grad
