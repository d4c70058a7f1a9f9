"""Decision Transformer: actions that follow from a return that is asked for (arXiv 2106.01345).

An episode is read as R_1 s_1 a_1 R_2 s_2 a_2 ..., where R_t is the sum of the rewards from step t on, its *return to
go*. Each of the three is embedded by a matrix of its own, plus an embedding of the time step, and normed. The output of
the decoder at s_t predicts a_t. To act, one asks for a return R_1, and goes on with R_{t+1} = R_t - r_t.

The paper reads the latest 20 steps anew for each action. Here a state goes on, and `windows` of the decoder bound its
view.

Shapes: B episodes, T steps, S numbers of a state of the world, A actions, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from memlm.errors import InvalidInput, check_range
from memlm.model import Decoder, DecoderState, ModelConfig
from memlm.model.exits import refuse_exits
from memlm.zoo.shapes.folders import load_folder, save_folder

MODEL_TYPE = "memlm-decisions"
RETURN, STATE, ACTION = range(3)  # places within a step


@dataclass(frozen=True)
class DecisionConfig:
    """The shape of a Decision Transformer. Raises InvalidInput for fields that do not fit together.

    `model` is that of the decoder, of any parts. Its `vocab_size` is the number of actions, and its context has room
    for three vectors a step. `num_steps` bounds an episode. Returns are divided by `return_scale`.
    """

    model: ModelConfig
    state_dim: int
    num_steps: int
    return_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("state_dim", "num_steps"):
            check_range(name, getattr(self, name), least=1, whole=True)
        check_range("return_scale", self.return_scale, above=0)
        refuse_exits("model", self.model)
        room = self.model.max_length
        if room is not None and room < 3 * self.num_steps:
            raise InvalidInput(
                f"{self.num_steps} steps take {3 * self.num_steps} places; the model has {room}: raise its"
                " context_length, or lower num_steps",
                field="num_steps",
            )

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields in JSON's types."""
        own = {name: getattr(self, name) for name in ("state_dim", "num_steps", "return_scale")}
        return {"model": self.model.as_dict(), **own}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> DecisionConfig:
        """Returns the config of `as_dict`. Raises InvalidInput or TypeError for other fields."""
        return cls(**{**given, "model": ModelConfig.from_dict(given["model"])})


@dataclass(frozen=True)
class Episodes:
    """Episodes to learn from. Steps that are not real stand behind those of a shorter episode, and are not learned."""

    states_BTS: Float[Tensor, "B T S"]
    actions_BT: Int[Tensor, "B T"]
    rewards_BT: Float[Tensor, "B T"]
    is_real_BT: Bool[Tensor, "B T"]

    @property
    def returns_BT(self) -> Float[Tensor, "B T"]:
        """The sums of the rewards of each step and the later ones."""
        return (self.rewards_BT * self.is_real_BT).flip(1).cumsum(1).flip(1)

    def rows(self, chosen: Int[Tensor, " N"]) -> Episodes:
        """Some of the episodes."""
        return Episodes(
            self.states_BTS[chosen], self.actions_BT[chosen], self.rewards_BT[chosen], self.is_real_BT[chosen]
        )


class World(Protocol):
    """Episodes that run side by side."""

    def states(self) -> Float[Tensor, "B S"]:
        """Returns the state of each episode."""

    def step(self, actions_B: Int[Tensor, " B"]) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
        """Takes an action in each episode. Returns the rewards, 0 in an episode that was over, and which are over."""


class DecisionTransformer(nn.Module):
    """A decoder that reads episodes. Seed torch before for reproducible parameters."""

    def __init__(self, config: DecisionConfig) -> None:
        super().__init__()
        self.config, D = config, config.model.dim
        self.decoder = Decoder(config.model)  # its token embedding is the matrix of the actions
        self.of_return = nn.Linear(1, D)
        self.of_state = nn.Linear(config.state_dim, D)
        self.of_step = nn.Embedding(config.num_steps, D)
        self.norm = nn.LayerNorm(D)
        for weight in (self.of_return.weight, self.of_state.weight, self.of_step.weight):
            nn.init.normal_(weight, std=0.02)  # as the decoder's own tables

    def forward(
        self, returns_BT: Float[Tensor, "B T"], states_BTS: Float[Tensor, "B T S"], actions_BT: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B T A"]:
        """Reads episodes from their first step, and returns the scores of the action of each step.

        They follow from the returns and states up to the step, and the actions before it.
        """
        B, T = actions_BT.shape
        if self.config.num_steps < T:
            raise InvalidInput(f"episodes have {T} steps; the model knows {self.config.num_steps}", field="num_steps")
        step_BT = torch.arange(T, device=actions_BT.device).expand(B, T)
        each_BT3D = torch.stack(
            [
                self._embed(self._return(returns_BT), step_BT),
                self._embed(self._state(states_BTS), step_BT),
                self._embed(self.decoder.token_vectors(actions_BT), step_BT),
            ],
            dim=2,
        )
        hidden_BND, _ = self.decoder.read(each_BT3D.flatten(1, 2))
        return self.decoder.logits(hidden_BND[:, STATE::3])

    def loss(self, episodes: Episodes) -> Float[Tensor, ""]:
        """Returns the cross-entropy of the real actions, in nats an action, plus the losses of the decoder's parts."""
        logits_BTA = self(episodes.returns_BT, episodes.states_BTS, episodes.actions_BT)
        real_BT = episodes.is_real_BT
        loss = F.cross_entropy(logits_BTA[real_BT].float(), episodes.actions_BT[real_BT])
        told = self.decoder.take_losses()
        return loss if told is None else loss + told

    def new_state(self, batch_size: int = 1) -> DecoderState:
        """Returns the state of episodes that have not begun. `reset` of a row begins another episode there."""
        return self.decoder.new_state(batch_size=batch_size, capacity=3 * self.config.num_steps)

    def act(
        self, returns_B: Float[Tensor, " B"], states_BS: Float[Tensor, "B S"], state: DecoderState
    ) -> Float[Tensor, "B A"]:
        """Reads the return to go and the state of the world of each episode, and returns the scores of its next action.

        Rows may be at different steps. Raises InvalidInput where the action of the last step was not read yet, and
        behind the last step.
        """
        step_B1 = self._steps(state, RETURN)
        vectors_B2D = torch.cat(
            [
                self._embed(self._return(returns_B[:, None]), step_B1),
                self._embed(self._state(states_BS[:, None]), step_B1),
            ],
            dim=1,
        )
        return self.decoder.logits(self.decoder.read(vectors_B2D, state)[0][:, -1])

    def take(self, actions_B: Int[Tensor, " B"], state: DecoderState) -> None:
        """Reads the action that each episode took. Raises InvalidInput where no state of the world was read before."""
        step_B1 = self._steps(state, ACTION)
        self.decoder.read(self._embed(self.decoder.token_vectors(actions_B[:, None]), step_B1), state)

    @torch.inference_mode()
    def play(
        self, world: World, asked_B: Float[Tensor, " B"], *, generator: torch.Generator | None = None
    ) -> Float[Tensor, " B"]:
        """Acts until all episodes are over, or for `num_steps` steps, and returns the sum of the rewards of each.

        Each episode asks for a return. Actions are drawn by `generator`, or are the likeliest without one.
        """
        state = self.new_state(len(asked_B))
        left_B, got_B = asked_B.clone(), torch.zeros_like(asked_B)
        for _ in range(self.config.num_steps):
            logits_BA = self.act(left_B, world.states(), state)
            if generator is None:
                actions_B = logits_BA.argmax(dim=1)
            else:
                actions_B = torch.multinomial(logits_BA.float().softmax(dim=1), 1, generator=generator)[:, 0]
            rewards_B, is_over_B = world.step(actions_B)
            left_B, got_B = left_B - rewards_B, got_B + rewards_B
            if is_over_B.all():
                break
            self.take(actions_B, state)
        return got_B

    def save(self, folder: str | Path) -> None:
        """Writes config.json and model.safetensors into a folder."""
        save_folder(folder, self, MODEL_TYPE, self.config.as_dict())

    @classmethod
    def load(cls, folder: str | Path) -> DecisionTransformer:
        """Reads the folder of `save`. Raises NotFound, Incompatible or Corrupt for any other."""
        return load_folder(folder, MODEL_TYPE, lambda given: cls(DecisionConfig.from_dict(given)))

    def _return(self, returns_BT: Tensor) -> Tensor:
        return self.of_return(returns_BT[..., None].to(self.decoder.dtype) / self.config.return_scale)

    def _state(self, states_BTS: Tensor) -> Tensor:
        if states_BTS.shape[-1] != self.config.state_dim:
            raise InvalidInput(
                f"states have {states_BTS.shape[-1]} numbers; the model reads {self.config.state_dim}",
                field="state_dim",
            )
        return self.of_state(states_BTS.to(self.decoder.dtype))

    def _embed(self, own_BTD: Tensor, step_BT: Tensor) -> Tensor:
        return self.norm(own_BTD + self.of_step(step_BT))

    def _steps(self, state: DecoderState, place: int) -> Int[Tensor, "B 1"]:
        """The step that each row of a state is at. Raises InvalidInput for rows that are at another place of it."""
        lengths = [row.length for row in state.rows]
        for number, length in enumerate(lengths):
            if length % 3 != place:
                needs = "no state of the world yet; call act" if place == ACTION else "no action yet; call take"
                raise InvalidInput(f"episode {number} has read {needs} before", field="state")
            if length // 3 >= self.config.num_steps:
                raise InvalidInput(
                    f"episode {number} has had its {self.config.num_steps} steps; reset its row", field="num_steps"
                )
        return torch.tensor([[length // 3] for length in lengths], device=self.decoder.device)
