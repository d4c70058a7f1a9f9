"""memlm as a model of the lm-evaluation-harness (`memlm lm-eval`, or `lm_eval.simple_evaluate(model=MemlmLM(...))`).

Contexts that are too long lose their beginning, as in the harness's own models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from memlm.api.chat import Message
from memlm.api.params import MAX_STOP_STRINGS, RetrievalParams
from memlm.generation.likelihood import loglikelihood, split_ids
from memlm.language_model import LanguageModel, load

MAX_TOKENS = 256  # of a text for which a task names no limit


@register_model("memlm")
class MemlmLM(LM):  # type: ignore[misc]  # the harness is untyped
    """A model with datastores. `retrieval` are the fields of `RetrievalParams`, which hold for every request."""

    def __init__(
        self,
        model: str | Path | LanguageModel,
        stores: Sequence[str | Path] | str = (),
        *,
        dtype: str = "auto",
        **retrieval: Any,
    ) -> None:
        """Loads a model, or takes a loaded one. `stores` may be one text with commas, as `--model_args` gives it."""
        super().__init__()
        if isinstance(stores, str):
            stores = stores.split(",")
        self.lm = model if isinstance(model, LanguageModel) else load(model, stores, dtype=dtype)
        self._retrieval, self._is_chat, self._params = retrieval, False, RetrievalParams.of(**retrieval)
        self._retriever = self.lm.engine.stores.retriever(self._params)
        self._as_document = self._retriever is not None and self._retriever.knn.changes_output

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of each continuation after its context, and whether greedy decoding gives it."""
        answers = []
        for request in tqdm(requests, disable=disable_tqdm):
            context, continuation = request.args
            context_ids, new_ids = self._split(context, continuation)
            read_ids = self._last(context_ids, 1 - len(new_ids))
            past = self.lm.engine.own_past(self._params)
            answers.append(loglikelihood(self.lm.checkpoint, read_ids, new_ids, self._retriever, past))
            self.cache_hook.add_partial("loglikelihood", request.args, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, window by window, as `memlm score` and `memlm eval` give it."""
        answers = []
        for request in tqdm(requests, disable=disable_tqdm):
            (text,) = request.args
            answers.append(-self.lm.score(text, **self._retrieval).nll)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers[-1])
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues each context up to one of its stop strings. Raises InvalidInput for more than 16 of them."""
        answers = []
        for request in tqdm(requests, disable=disable_tqdm):
            context, options = request.args
            until = options.get("until") or ()
            stop = [until] if isinstance(until, str) else list(dict.fromkeys(until))
            max_tokens = int(options.get("max_gen_toks", MAX_TOKENS))
            sampled = {name: options[name] for name in ("top_p", "top_k", "min_p") if options.get(name) is not None}
            temperature = float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0
            text = self.lm.generate(
                self._last(self._ids_of(context), -max_tokens), max_tokens=max_tokens, temperature=temperature,
                stop=stop[:MAX_STOP_STRINGS], **(sampled if temperature else {}), **self._retrieval,
            ).result().text  # fmt: skip
            answers.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return answers

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. From then on, contexts have special tokens."""
        self._is_chat = True
        messages = [Message(each["role"], each["content"]) for each in chat_history]
        return self.lm.checkpoint.chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's caches."""
        return f"{self.lm.info.name}-{self.lm.info.tokenizer_fingerprint}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the model's template, for the report."""
        return self.lm.checkpoint.chat_template.source if chat_template else ""

    def _ids_of(self, context: str) -> list[int]:
        if self._is_chat:
            return self.lm.tokenizer.encode_special(context)
        return self.lm.tokenizer.framed(self.lm.tokenize(context), as_document=self._as_document)

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if self._is_chat:
            return self._ids_of(context), self.lm.tokenize(continuation)
        text = context.rstrip()  # white space belongs to what follows, as the harness has it
        context_ids, new_ids = split_ids(self.lm.tokenizer, text, context[len(text) :] + continuation)
        return self.lm.tokenizer.framed(context_ids, as_document=self._as_document), new_ids

    def _last(self, ids: list[int], room: int) -> list[int]:
        """The last tokens that fit, where `room` more (fewer below 0) than the model's longest do."""
        longest = self.lm.checkpoint.decoder.config.max_length
        return ids if longest is None else ids[-max(1, longest + room) :]
