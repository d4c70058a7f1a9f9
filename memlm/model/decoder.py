"""The decoder: token ids and a state -> hidden states, keys and log-probabilities.

The *key* of a position is the input of the last layer's feed-forward, after its norm, as in kNN-LM (arXiv 1911.00172,
section 3). It predicts the next token. With a parallel residual, that input does not include the last attention. With
post-norms, it is the output of attention's norm. Where norms follow the sub-layers only (OLMo 2), it is the residual
stream.

Text is read in steps that cross no segment boundary. A prediction depends on the token's place in the text alone, not
on the pieces in which the text was read.

Shapes: B batch, T time, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from memlm.base.cpu import threads
from memlm.errors import InvalidInput
from memlm.model.adapters import Adapters
from memlm.model.attention.knn_attention import exact
from memlm.model.attention.mask import AttentionMask
from memlm.model.attention.watch import Watch
from memlm.model.config import ModelConfig
from memlm.model.embedding import Embedding
from memlm.model.forward import ForwardContext
from memlm.model.kernels.linear import Linear, panel_weights, stored_as
from memlm.model.kernels.native_step import NativeStep
from memlm.model.kernels.quantized import PanelWeight
from memlm.model.layers import Block
from memlm.model.norms import make_norm
from memlm.model.positions import BIASES, RelativeBias, Rotary, sinusoids
from memlm.model.state.decoder_state import DecoderState, check_room
from memlm.model.state.fields import fields_of
from memlm.model.state.pages import Allocate, zeros
from memlm.model.state.segments import update_memories_at_boundary
from memlm.model.state.source import Source

FEW_TOKENS = 4
ONE_THREAD_BYTES = 64 << 20
ONE_THREAD_NUMBERS = 1 << 20
# Tokens (B, T), or vectors (B, T, D) in their place.
Inputs: TypeAlias = Tensor
INTO_RESIDUAL = ("out.weight", "down.weight")


class Decoder(nn.Module):
    """A causal language model of the shape `config`. Parameters start as GPT-2's do, scaled by depth.

    Seed torch before for reproducible parameters.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.adapters = config, Adapters()
        self.embedding = Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.context_length, config.dim) if config.positions == "learned" else None
        self.relative_bias: RelativeBias | None = None
        if config.positions in BIASES:
            self.relative_bias = BIASES[config.positions](config)
        self.rotary = Rotary(config) if config.positions == "rotary" else None
        self.blocks: Sequence[Block] = nn.ModuleList(Block(config, n) for n in range(config.num_blocks))  # type: ignore[assignment]
        self.stack: Any = None if config.stack is None else config.stack.build(config, 0)
        self.border: Any = None if config.border is None else config.border.build(config, 0)
        self.cross: Any = None if config.cross is None else config.cross.build_shared(config)
        self.norm = nn.Identity() if config.norm_order == "post" else make_norm(config)
        self.head = Linear(config.dim, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        self._initialize()
        # Parts may learn from losses of their own, and states hold what they remember.
        self._has_parts, self._has_fields = not config.is_plain, bool(fields_of(config))
        self._has_borders, self._has_exits = config.is_segmented, hasattr(self.stack, "loss")
        self.losses = dict[str, Tensor]()

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters and of the computation."""
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the parameters as loaded. An embedding in the model's file counts as part of the head."""
        weights = panel_weights(self)
        rest = self.num_parameters - sum(weight.out_features * weight.in_features for weight in weights)
        return rest * self.dtype.itemsize + sum(weight.num_bytes for weight in weights)

    @property
    def dtype_name(self) -> str:
        """How most of the weights are stored: as numbers of `dtype`, as int8 or int4, or as the types of the file."""
        return stored_as(self, self.dtype)

    @cached_property
    def _native_step(self) -> NativeStep | None:
        return NativeStep.of(self)

    @property
    def reads_alike(self) -> bool:
        """Whether a token's hidden state, key and log-probabilities have the same bits however many tokens a pass
        reads, beside it or before it. Holds for passes with a state, without gradients and without `starts_BT`.

        Elsewhere they are equal up to rounding, so that two tokens of nearly equal probability may change places.
        """
        return self._native_step is not None and isinstance(self.head.packed, PanelWeight)

    @cached_property
    def num_parameters(self) -> int:
        """Learned numbers. The tied embedding counts once, packed weights as if unpacked."""
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        counted = {id(parameter) for module in (self.embedding, *linears) for parameter in module.parameters()}
        rest = sum(parameter.numel() for parameter in self.parameters() if id(parameter) not in counted)
        untied = [linear for linear in linears if linear is not self.head or not self.config.tied_embeddings]
        return rest + self.config.vocab_size * self.config.dim + sum(linear.num_parameters for linear in untied)

    @cached_property
    def output_embedding_VD(self) -> Float[Tensor, "V D"]:
        """The matrix that turns final states into logits."""
        if self.config.tied_embeddings:
            return self.embedding.table_VD
        return self.head.dense()

    def pack(self, *, bits: int | None = None) -> Decoder:
        """Lays the weights out for prediction, which takes half the time then, or rounds them to 8 or 4 bits.

        A packed decoder cannot learn.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(bits=bits)
        return self

    def weights(self) -> dict[str, Tensor]:
        """The parameters by name as checkpoints store them, the tied embedding once."""
        weights = dict(self.state_dict())
        for name, module in self.named_modules():
            if isinstance(module, Linear) and module.packed is not None:
                weights[f"{name}.weight"] = module.dense()
        weights["embedding.weight"] = self.embedding.table_VD
        if self.config.tied_embeddings:
            del weights["head.weight"]
        return weights

    def new_state(
        self,
        *,
        batch_size: int = 1,
        capacity: int | None = None,
        training: bool = False,
        allocate: Allocate = zeros,
        adapters_B: Sequence[str | None] | None = None,
        sources_B: Sequence[Source] | None = None,
    ) -> DecoderState:
        """Returns an empty state with room for `capacity` tokens a row (default: the context length).

        `adapters_B` names the adapter that each row is read with, None for the model alone. `sources_B` are
        what the rows of a model with cross attention read. Raises NotFound for an adapter that is not attached, and
        InvalidInput for sources that do not fit the model.
        """
        state = DecoderState(
            self.config, batch_size=batch_size, capacity=capacity, dtype=self.dtype, device=self.device,
            training=training, allocate=allocate,
        )  # fmt: skip
        names_B = [self.adapters.default] * batch_size if adapters_B is None else adapters_B
        for row, name in zip(state.rows, names_B, strict=True):
            row.adapter = None if name is None else self.adapters.find(name)
        if sources_B is not None:
            state.give_sources(sources_B)
        return state

    def forward(
        self,
        tokens_BT: Int[Tensor, "B T"],
        state: DecoderState | None = None,
        *,
        starts_BT: Bool[Tensor, "B T"] | None = None,
        new_B: list[int] | None = None,
        watch: Watch | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Reads T tokens after those in `state` and returns the final hidden states and the keys. The state is updated.

        `starts_BT` is true where a document begins: its tokens do not see earlier ones of their row. `new_B` counts the
        tokens of each row that are text. The others are padding behind them. A `watch` sees the attention of all heads,
        which takes longer. Raises InvalidInput if the tokens do not
        fit behind those in the state.
        """
        with self.adapters.reading(state):
            return self._read(tokens_BT, state, starts_BT, new_B, watch=watch)

    def read(
        self,
        vectors_BTD: Float[Tensor, "B T D"],
        state: DecoderState | None = None,
        *,
        starts_BT: Bool[Tensor, "B T"] | None = None,
        new_B: list[int] | None = None,
        watch: Watch | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Reads vectors in the place of tokens, with all that `forward` promises. Vectors and tokens may follow each
        other in a state.

        A vector stands for a token's embedding, as `token_vectors` returns it: positions that are added come on top.
        Raises InvalidInput for other widths, and where a part of the model needs tokens.
        """
        if vectors_BTD.shape[-1] != self.config.dim:
            raise InvalidInput(f"vectors are {vectors_BTD.shape[-1]} wide; the model reads {self.config.dim}")
        for part in self.config.parts:  # before earlier layers change the state
            if part.needs_tokens:
                raise InvalidInput(
                    f"the part {part.kind} chooses by tokens, and vectors were given; read tokens", field=part.seam
                )
        with self.adapters.reading(state):
            return self._read(vectors_BTD.to(self.dtype), state, starts_BT, new_B, watch=watch)

    def keys(self, tokens_BT: Int[Tensor, "B T"], state: DecoderState | None = None) -> Float[Tensor, "B T D"]:
        """Returns only the keys, without computing the last feed-forward."""
        with self.adapters.reading(state):
            return self._read(tokens_BT, state, None, None, finishes=False)[1]

    def logits(self, hidden: Float[Tensor, "*P D"]) -> Float[Tensor, "*P V"]:
        """Returns scores of the next token, in the type of the parameters."""
        return self.head(hidden)

    def logprobs(self, hidden: Float[Tensor, "*P D"]) -> Float[Tensor, "*P V"]:
        """Returns log-probabilities of the next token, in float32."""
        logits = self.logits(hidden).float()
        # torch's threads spin for a while after their work, and would take a core from the native step that follows.
        alone = isinstance(self.head.packed, PanelWeight) and logits.numel() <= ONE_THREAD_NUMBERS
        with threads(1) if alone else nullcontext():
            return torch.log_softmax(logits, dim=-1)

    def _read(
        self,
        inputs: Inputs,
        state: DecoderState | None,
        starts_BT: Bool[Tensor, "B T"] | None,
        new_B: list[int] | None,
        *,
        finishes: bool = True,
        watch: Watch | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Returns the final hidden states and the keys. Without `finishes`, the first are those before the last
        feed-forward.
        """
        inputs = inputs.to(self.device)
        B, T = inputs.shape[:2]
        new_B = [T] * B if new_B is None else new_B
        if self._has_exits:
            self.stack.begin_pass()
        if state is None:
            needs_state = self.config.is_segmented or self.config.extended_attention or self._has_fields
            needs_state = needs_state or self.config.reads_source
            if not needs_state and starts_BT is None:
                return self._read_at_once(inputs, finishes, watch)
            state = self.new_state(batch_size=B, capacity=T)
        check_room(state, max(new_B))
        state.begin_pass(inputs.detach())
        hidden, keys, begin = [], [], 0
        while begin < T:
            end = begin + state.next_piece(T - begin)
            piece = slice(begin, end)
            new_b = [min(max(new - begin, 0), end - begin) for new in new_B]
            parts = self._read_piece(
                inputs[:, piece], state, None if starts_BT is None else starts_BT[:, piece], new_b, finishes, watch,
                (end - begin) / T,
            )  # fmt: skip
            hidden.append(parts[0])
            keys.append(parts[1])
            begin = end
        if len(keys) == 1:
            return hidden[0], keys[0]
        return torch.cat(hidden, dim=1), torch.cat(keys, dim=1)

    def _read_at_once(self, inputs: Inputs, finishes: bool, watch: Watch | None) -> tuple[Tensor, Tensor]:
        """Reads a whole text without a state."""
        T = inputs.shape[1]
        if self.config.max_length is not None and self.config.max_length < T:
            raise InvalidInput(
                f"{T} tokens do not fit into the {self.config.max_length} places left; shorten the text", field="prompt"
            )
        places = torch.arange(T, device=inputs.device)[None]
        zero = torch.zeros(1, dtype=torch.int64, device=inputs.device)
        sinks, windows = self.config.num_sinks, self.config.windows
        mask = AttentionMask(
            query_RT=places, key_RS=places, query_span=(0, T), key_span=(0, T), document_RT=torch.zeros_like(places),
            floor_R=zero,
            num_front=min(sinks, T), sink_cap=sinks + max(windows) - 1 if sinks else 0, causal_only=not sinks,
        )  # fmt: skip
        new_B = [T] * inputs.shape[0]
        losses = self.losses if self._has_parts and torch.is_grad_enabled() else None
        context = ForwardContext(
            mask, new_B, self.dtype, None, self.rotary, self.relative_bias, watch, _tokens(inputs), losses
        )
        return self._through_layers(inputs, context, finishes)

    def loss(self, hidden_BTD: Float[Tensor, "B T D"], targets_BT: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        """Returns the nats of the next tokens, a mean over the targets that are not -100. `hidden_BTD` are the final
        states of the latest pass. A stack with a loss of its own, such as exits, computes it from this pass instead.
        """
        if self._has_exits:
            own: Tensor = self.stack.loss(self, targets_BT)
            return own
        return F.cross_entropy(exact(self.logits(hidden_BTD)).flatten(0, 1), targets_BT.flatten())

    def take_losses(self) -> Float[Tensor, ""] | None:
        """Returns the sum of the losses that parts told since the last call, each a mean over the tokens of its pass,
        or None. They are told where gradients are computed.
        """
        losses, self.losses = self.losses, {}
        return torch.stack(list(losses.values())).sum() if losses else None

    def crop(self, state: DecoderState, length_B: Sequence[int]) -> None:
        """Takes back tokens of the last pass, as `DecoderState.crop` does.

        Where the state has sums, the tokens of the pass that stay are read again.
        """
        if (again := state.crop(length_B)) is not None:
            inputs_BT, new_B = again
            if inputs_BT.shape[1]:
                with self.adapters.reading(state):
                    self._read(inputs_BT, state, None, new_B)

    def _read_piece(
        self,
        inputs: Tensor,
        state: DecoderState,
        starts_BT: Tensor | None,
        new_B: list[int],
        finishes: bool,
        watch: Watch | None,
        share: float,
    ) -> tuple[Tensor, Tensor]:
        """Reads a piece that crosses no segment boundary, and updates the memories if it ends at one."""
        T = inputs.shape[1]
        if self._has_parts:
            self._begin_piece(state, starts_BT)
        state.make_room(T)
        document_BT = None if starts_BT is None or not bool(starts_BT.any()) else _documents(state, starts_BT)
        mask = state.attention_mask(new_B, T, document_BT)
        losses = self.losses if self._has_parts and torch.is_grad_enabled() else None
        context = ForwardContext(
            mask, new_B, self.dtype, state, self.rotary, self.relative_bias, watch, _tokens(inputs), losses, share
        )
        read = self._through_layers(inputs, context, finishes)
        state.advance(new_B)
        if document_BT is not None:
            last_B = zip(document_BT[:, -1].tolist(), state.rows, strict=True)
            state.begin_documents([start if start != row.start else None for start, row in last_B])
        if self._has_borders:
            self.end_piece(state)
        return read

    def _begin_piece(self, state: DecoderState, starts_BT: Tensor | None) -> None:
        """Begins the documents of the first tokens now, or the parts would read the memory of the text before."""
        if starts_BT is not None:
            begins = zip(starts_BT[:, 0].tolist(), state.rows, strict=True)
            state.begin_documents([row.length if begins_here else None for begins_here, row in begins])
        if self.border is not None:
            self.border.begin(self, state)

    def end_piece(self, state: DecoderState) -> None:
        """Updates the memories of the rows that have just filled a segment."""
        if self.border is not None:
            self.border.end(self, state)
        elif self.config.is_segmented:
            update_memories_at_boundary(list(self.blocks), self.rotary, state)

    def _through_layers(self, inputs: Inputs, context: ForwardContext, finishes: bool) -> tuple[Tensor, Tensor]:
        self.begin_step(context)
        return self.through_blocks(self.embed(inputs, context.mask), context, finishes=finishes)

    def begin_step(self, context: ForwardContext) -> None:
        """Prepares a step for the layers with a cross."""
        if self.cross is not None:
            self.cross.begin(self, context)

    def through_blocks(
        self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext, *, finishes: bool
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Reads vectors in the place of embedded tokens. Returns the final hidden states and the keys, or without
        `finishes` the residual stream before the last feed-forward and the keys.
        """
        if self.stack is not None:
            hidden_BTD, keys_BTD = self.stack.read(self.blocks, hidden_BTD, context, finishes=finishes)
            return self.norm(hidden_BTD) if finishes else hidden_BTD, keys_BTD
        if self._native_step is not None and self._native_step.takes(context):
            return self._natively(self._native_step, hidden_BTD, context, finishes)
        return self._in_torch(hidden_BTD, context, finishes)

    def _in_torch(self, hidden_BTD: Tensor, context: ForwardContext, finishes: bool) -> tuple[Tensor, Tensor]:
        for block in self.blocks[:-1]:
            hidden_BTD = block.finish(*block.attend(hidden_BTD, context), context)
        attended_BTD, keys_BTD = self.blocks[-1].attend(hidden_BTD, context)
        if not finishes:
            return attended_BTD, keys_BTD
        return self.norm(self.blocks[-1].finish(attended_BTD, keys_BTD, context)), keys_BTD

    def _natively(
        self, step: NativeStep, hidden_BTD: Tensor, context: ForwardContext, finishes: bool
    ) -> tuple[Tensor, Tensor]:
        """Computes the rows without an adapter in the native step, and the others in torch.

        So the first have the same bits beside any other rows. Each part has all rows, with no new tokens in the others.
        """
        if (selected := self.adapters.selected) is None:
            return step(hidden_BTD, context, finishes=finishes)
        which_B = selected.which_B or [0] * len(context.new_B)
        plain_B = [new if which < 0 else 0 for which, new in zip(which_B, context.new_B, strict=True)]
        adapted_B = [new if which >= 0 else 0 for which, new in zip(which_B, context.new_B, strict=True)]
        in_torch = replace(context, new_B=adapted_B)
        if not any(plain_B):
            return self._in_torch(hidden_BTD, in_torch, finishes)
        plain = step(hidden_BTD, replace(context, new_B=plain_B), finishes=finishes)
        is_plain_B11 = torch.tensor(which_B)[:, None, None] < 0
        adapted = self._in_torch(hidden_BTD, in_torch, finishes)
        return torch.where(is_plain_B11, plain[0], adapted[0]), torch.where(is_plain_B11, plain[1], adapted[1])

    def token_vectors(self, tokens_BT: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Returns the embeddings of tokens, scaled, without positions: the vectors that `read` takes."""
        vectors_BTD = self.embedding(tokens_BT)
        if self.config.embedding_scale != 1:
            vectors_BTD = vectors_BTD * vectors_BTD.new_tensor(self.config.embedding_scale)
        return vectors_BTD

    def embed(self, inputs: Inputs, mask: AttentionMask) -> Float[Tensor, "B T D"]:
        """Returns embeddings of tokens, or vectors in their place, plus positions for the models that add them.

        Sinusoidal positions count within the document. Learned ones also start again at each segment.
        """
        hidden_BTD = inputs if inputs.is_floating_point() else self.token_vectors(inputs)
        if self.positions is not None:
            in_document_RT = mask.query_RT - mask.document_RT
            return hidden_BTD + self.positions(in_document_RT.minimum(mask.query_RT % self.config.context_length))
        if self.config.positions == "sinusoidal":
            waves = sinusoids(mask.query_RT - mask.document_RT, self.config.dim)
            return hidden_BTD + waves.to(hidden_BTD.dtype)
        return hidden_BTD

    def _initialize(self) -> None:
        into_residual = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and not name.endswith(("u_Hd", "v_Hd")):
                nn.init.normal_(parameter, std=into_residual if name.endswith(INTO_RESIDUAL) else 0.02)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)
        for module in self.modules():
            if callable(initialize := getattr(module, "initialize", None)):  # parts own their start
                initialize()


def _tokens(inputs: Inputs) -> Int[Tensor, "B T"] | None:
    return None if inputs.is_floating_point() else inputs


def _documents(state: DecoderState, starts_BT: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Returns the position at which the document of each new token begins."""
    marks = torch.tensor([[row.length, row.start] for row in state.rows], device=starts_BT.device)
    lengths_B1, starts_B1 = marks.split(1, dim=1)
    positions_BT = lengths_B1 + torch.arange(starts_BT.shape[1], device=starts_BT.device)
    begins_BT = torch.where(starts_BT, positions_BT, starts_B1)
    return begins_BT.cummax(dim=1).values


def decoding_threads(decoder: Decoder, num_tokens: int) -> AbstractContextManager[None]:
    """Reads a few tokens of a small model on one thread.

    More threads save nothing there, and waiting for each other can take long: a step of the tiny preset takes 0.43 ms
    on one thread and on two, and took 30 ms on two while the second core was busy (benchmarks/log).
    """
    is_small = num_tokens <= FEW_TOKENS and decoder.num_bytes < ONE_THREAD_BYTES
    return threads(1) if is_small else nullcontext()
