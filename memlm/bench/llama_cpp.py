"""A model in llama.cpp, through the low-level calls of `llama-cpp-python`: greedy texts, one batch a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from memlm.errors import InvalidInput

FTYPES = {"F16": 1, "Q8_0": 7}  # llama_ftype of llama.h
PROMPT_BATCH = 512


def library() -> ModuleType:
    """The package. Raises InvalidInput where it is not installed."""
    if find_spec("llama_cpp") is None:
        raise InvalidInput(
            "bench versus needs `llama-cpp-python`, which a C++ compiler builds; install it with"
            " `pip install 'memlm[bench]'`"
        )
    import llama_cpp

    return llama_cpp


def convert(source: Path, kind: str, target: Path) -> Path:
    """Writes a GGUF file with the matrices of another, in F16 or Q8_0, by llama.cpp's own quantizer."""
    api = library()
    _be_silent(api)
    params = api.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = FTYPES[kind], True
    if api.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) != 0:
        raise InvalidInput(f"llama.cpp does not write {source} in {kind}; give another model", field="model")
    return target


class LlamaCpp:
    """A loaded model. Sequences share its cache."""

    def __init__(self, path: Path, *, streams: int, context: int, threads: int) -> None:
        self._api: Any = library()
        _be_silent(self._api)
        self._api.llama_backend_init()
        self._model = self._api.llama_model_load_from_file(str(path).encode(), self._api.llama_model_default_params())
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = streams * context, streams
        params.n_batch = params.n_ubatch = PROMPT_BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = self._api.llama_init_from_model(self._model, params)
        self._batch = self._api.llama_batch_init(PROMPT_BATCH, 0, 1)
        self._vocab_size = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))

    def close(self) -> None:
        """Frees the model."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def read(self, prompt: Sequence[int], streams: int = 1) -> list[int]:
        """Reads a prompt into some sequences, in place of their texts. Returns the next token of each."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        drawn = []
        for stream in range(streams):
            places = [(token, position, stream) for position, token in enumerate(prompt)]
            drawn += self._decoded(places, [len(prompt) - 1])
        return drawn

    def step(self, tokens: Sequence[int], position: int) -> list[int]:
        """Reads one token of each sequence. Returns the next ones."""
        return self._decoded([(token, position, stream) for stream, token in enumerate(tokens)], range(len(tokens)))

    def _decoded(self, places: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> list[int]:
        batch = self._batch
        batch.n_tokens = len(places)
        for number, (token, position, stream) in enumerate(places):
            batch.token[number], batch.pos[number] = token, position
            batch.n_seq_id[number], batch.seq_id[number][0] = 1, stream
            batch.logits[number] = number in wanted
        if self._api.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama.cpp did not decode a batch")
        return [self._likeliest(number) for number in wanted]

    def _likeliest(self, number: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, number)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


def _be_silent(api: Any) -> None:
    if not hasattr(api, "_memlm_log"):
        api._memlm_log = api.llama_log_callback(lambda *_: None)  # kept: the library calls it until it ends
        api.llama_log_set(api._memlm_log, None)
