"""A datastore for `transformers`: a logits processor that mixes p_kNN into any `generate`.

    lm = memlm.load("smollm", stores=["store"])
    with DatastoreProcessor(model, lm) as processor:
        model.generate(**inputs, logits_processor=[processor])

`model` is the transformers model of the same weights. Its own forward pass gives the keys, so that nothing is computed
twice; `lm` is read for its tokenizer and datastores, and its mapped weights are never touched. Texts of the datastore
begin with `lm.tokenizer.start_id`, so prompts should begin with it too.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from memlm.api.options import RetrievalOptions
from memlm.api.params import RetrievalParams
from memlm.errors import Incompatible, InvalidInput
from memlm.language_model import LanguageModel
from memlm.retrieval.result import mix_memory


class DatastoreProcessor(LogitsProcessor):
    """Replaces the scores of each step by the logarithms of λ p_kNN + (1 - λ) p_LM (arXiv 1911.00172, equation 3).

    A key is the input of the last block's feed-forward, which a hook takes from the model's forward pass until `close`.
    Every token is searched. Works with greedy decoding, sampling and beams, of batches padded to the left. Raises
    InvalidInput without a datastore, and for the gate of SPALM; Incompatible for a model whose last block or width is
    another one.
    """

    def __init__(self, model: nn.Module, lm: LanguageModel, **options: Unpack[RetrievalOptions]) -> None:
        """Takes the fields of `RetrievalParams`."""
        retriever = lm.engine.stores.retriever(RetrievalParams.of(**options))
        if retriever is None:
            raise InvalidInput(
                "no datastore with keys is loaded, and this needs one; give stores to memlm.load", field="store"
            )
        if retriever.knn.gate is not None:
            raise InvalidInput("spalm is not supported here; leave it out", field="spalm")
        self._retriever, self._dim = retriever, lm.info.dim
        self._keys_BD: Tensor | None = None
        self._hook = _last_feed_forward(model).register_forward_pre_hook(self._take)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mixes the scores of the next token, one row a sequence."""
        if self._keys_BD is None or len(self._keys_BD) != len(scores):
            raise Incompatible("the model did not compute these scores; give `generate` of the model with the hook")
        lm_logprobs_BV = torch.log_softmax(scores.float(), dim=-1).cpu()
        keys_BD = self._keys_BD.float().cpu().numpy()
        found = self._retriever.search(keys_BD, lm_logprobs_BV.amax(dim=1).numpy())
        mixed = [mix_memory(lm_logprobs_V, found, row).logprobs_V for row, lm_logprobs_V in enumerate(lm_logprobs_BV)]
        return torch.stack(mixed).to(scores)

    def close(self) -> None:
        """Removes the hook from the model."""
        self._hook.remove()

    def __enter__(self) -> DatastoreProcessor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        keys_BD = inputs[0].detach()
        keys_BD = keys_BD[:, -1] if keys_BD.dim() == 3 else keys_BD
        if keys_BD.shape[1] != self._dim:
            raise Incompatible(
                f"the keys of the model have {keys_BD.shape[1]} numbers, those of the datastore {self._dim}; load the"
                " model that built it"
            )
        self._keys_BD = keys_BD


def _last_feed_forward(model: nn.Module) -> nn.Module:
    blocks = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part)]
    found = [mlp for part in blocks if isinstance(mlp := getattr(part[-1], "mlp", None), nn.Module)]
    if len(found) != 1:
        raise Incompatible(
            f"{type(model).__name__} has {len(found)} lists of blocks with an mlp; expected one, as in GPT-2 and Llama"
        )
    return found[0]
