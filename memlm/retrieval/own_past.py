"""How a text's own past is weighed: p_past, its λ, and the mixture of both memories, past and datastores.

The past is mixed last, so that its settings and those of the datastores do not depend on each other:

    p = λ_past p_past + (1 - λ_past) (λ p_kNN + (1 - λ) p_LM)

That is one mixture with a larger λ, in which the neighbors of both share a softmax.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int64

from memlm.api.generation import Neighbor
from memlm.base.files import write_atomic
from memlm.data.tokenizer import Tokenizer
from memlm.errors import Corrupt, InvalidInput, check_range
from memlm.index.neighbors import Neighbors
from memlm.model.files.gguf import companion
from memlm.retrieval.adaptive import AdaptiveLam, features_of
from memlm.retrieval.context_cache import ContextCache
from memlm.retrieval.result import RetrievalResult

SETTINGS_FILE = "context-cache.json"
OWN_PAST = -1  # instead of the number of a store
CONTEXT, THIS_TEXT = "context", "this text"  # as store and document of a neighbor
SNIPPET_TOKENS = 12


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """How the positions of a text speak about its next token: `k` of them, the softmax temperature over their squared
    distances, and λ. `gain` are the nats per token that they saved on the text that they were tuned on, and
    `gain_error` its standard error over documents.
    """

    k: int
    temperature: float
    lam: float
    adaptive: AdaptiveLam | None = None
    tuned_on: str = ""
    gain: float = 0.0
    gain_error: float = 0.0

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        check_range("k", self.k, least=1, whole=True)
        check_range("temperature", self.temperature, above=0)
        check_range("lam", self.lam, least=0, most=1)

    @classmethod
    def load(cls, model: Path) -> ContextSettings | None:
        """Returns those that `memlm tune` saved with a model, None without any. Raises Corrupt."""
        path = companion(model, SETTINGS_FILE)
        if not path.is_file():
            return None
        try:
            return cls._of(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, InvalidInput) as error:
            raise Corrupt(f"{path} holds no settings ({error}); run `memlm tune` again") from error

    def save(self, model: Path) -> None:
        """Writes them beside a model."""
        write_atomic(companion(model, SETTINGS_FILE), (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def _of(cls, fields: Mapping[str, Any]) -> ContextSettings:
        adaptive = fields["adaptive"]
        return cls(**{**fields, "adaptive": None if adaptive is None else AdaptiveLam.of(adaptive)})

    def weigh(self, found: Neighbors, max_logprobs_Q: Float32[np.ndarray, " Q"]) -> RetrievalResult:
        """Weighs the nearest positions to Q keys. `max_logprobs_Q` are the model's largest log-probabilities."""
        weighed = RetrievalResult.of(found, self.temperature, self.lam, OWN_PAST)
        if self.adaptive is None:
            return weighed
        features_QF = features_of(found, weighed.logweights_QK, self.temperature, max_logprobs_Q)
        return replace(weighed, lams_Q=self.adaptive.lams(features_QF).astype(np.float64))


class OwnPast:
    """The past of one text as a memory: a cache of its positions, of which at most the last `most` are searched. One of
    a session records them even if a request searches none.
    """

    def __init__(self, settings: ContextSettings, cache: ContextCache, most: int | None = None) -> None:
        self._settings, self.cache, self._most = settings, cache, most

    @property
    def is_searched(self) -> bool:
        """Whether the positions speak."""
        return self._most != 0

    def read(self, token_ids: Sequence[int], keys_ND: Float[np.ndarray, "N D"]) -> None:
        """Adds N tokens that the model has read, with the key after each."""
        self.cache.follow(token_ids)
        self.cache.append(keys_ND, np.array([*token_ids[1:], -1]))

    def search(self, keys_ND: Float[np.ndarray, "N D"], max_logprobs_N: Float32[np.ndarray, " N"]) -> RetrievalResult:
        """Finds the neighbors of the last N positions, each among the positions before it."""
        sizes_N = len(self.cache) - len(keys_ND) + np.arange(len(keys_ND))
        return self._settings.weigh(self.cache.search(keys_ND, self._settings.k, sizes_N, self._most), max_logprobs_N)


def describe_past(
    result: RetrievalResult, count: int, text_ids: Sequence[int], first: int, tokenizer: Tokenizer
) -> dict[int, Neighbor]:
    """Describes those of the first `count` neighbors of a key that are of the text's own past, by their columns.

    The token that follows position n stands at `first` + n in the text.
    """
    near, described = result.neighbors, dict[int, Neighbor]()
    columns = np.flatnonzero((result.stores_QK[0, :count] == OWN_PAST) & (near.ids_QK[0, :count] >= 0))
    if not len(columns):
        return described
    ids_n = np.asarray(text_ids)
    characters_n, line_ends_n = (np.cumsum(counts[ids_n]) for counts in (tokenizer.characters, tokenizer.newlines))
    for column in columns.tolist():
        place = first + int(near.ids_QK[0, column])
        characters, line_ends = (int(each_n[place - 1]) if place else 0 for each_n in (characters_n, line_ends_n))
        around = slice(max(0, place - SNIPPET_TOKENS), place + SNIPPET_TOKENS)
        token_id = int(near.values_QK[0, column])
        described[column] = Neighbor(
            store=CONTEXT,
            document_id=THIS_TEXT,
            title="",
            token_offset=place,
            char_offset=max(0, characters - tokenizer.prepends_space),
            line=1 + line_ends,
            token_id=token_id,
            token_text=tokenizer.decode((token_id,)),
            distance=float(near.distances_QK[0, column]),
            weight=float(np.exp(result.logweights_QK[0, column])),
            snippet=tokenizer.decode(text_ids[around]),
        )
    return described


def nothing_before(
    ids_E: Int64[np.ndarray, " E"], stores_E: Int64[np.ndarray, " E"], count: int
) -> Int64[np.ndarray, "E C"]:
    """No tokens before entries, for the guard against loops: a text that copies its own past is in a loop."""
    return np.full((len(ids_E), count), -1)


def with_past(memory: RetrievalResult | None, past: RetrievalResult) -> RetrievalResult:
    """Mixes the past of Q texts over their neighbors in datastores."""
    if memory is None:
        return past
    parts = (memory, past)
    memory_Q, past_Q = (np.where(part.neighbors.ids_QK[:, 0] >= 0, part.lams_Q, 0.0) for part in parts)
    memory_Q = (1 - past_Q) * memory_Q
    lams_Q = memory_Q + past_Q
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = [np.where(lams_Q > 0, each_Q / lams_Q, 0.5) for each_Q in (memory_Q, past_Q)]
        logweights_QM = np.concatenate(
            [part.logweights_QK + np.log(share_Q)[:, None] for part, share_Q in zip(parts, shares, strict=True)], axis=1
        ).astype(np.float32)
    arrays: list[list[np.ndarray]] = [
        [part.neighbors.distances_QK for part in parts], [part.neighbors.ids_QK for part in parts],
        [part.neighbors.values_QK for part in parts], [logweights_QM], [part.stores_QK for part in parts],
    ]  # fmt: skip
    distances_QM, ids_QM, values_QM, logweights_QM, stores_QM = (np.concatenate(each, axis=1) for each in arrays)
    order_QM = np.lexsort((-logweights_QM, ids_QM < 0), axis=1)  # missing ones stand last
    distances_QM, ids_QM, values_QM, logweights_QM, stores_QM = (
        np.take_along_axis(each, order_QM, axis=1)
        for each in (distances_QM, ids_QM, values_QM, logweights_QM, stores_QM)
    )
    return replace(
        memory,
        neighbors=Neighbors(distances_QM, ids_QM, values_QM),
        logweights_QK=logweights_QM,
        lams_Q=lams_Q,
        stores_QK=stores_QM,
        took_ms=memory.took_ms + past.took_ms,
    )
