"""Windows -> keys and log-probabilities: in batches, or one after another by a model with memory of earlier segments.

Windows of similar length are encoded together, padded on the right, which causal attention never sees. Results come in
the order of the windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Float16, Float32, Int64
from torch import Tensor

from memlm.base.cpu import threads
from memlm.base.steps import Steps
from memlm.data.windows import Window, WindowSize, check_stride, segments_of, windows_of
from memlm.errors import InvalidInput, check_range
from memlm.model import Decoder, DecoderState
from memlm.model.files.checkpoint import Checkpoint

BATCH_TOKENS = 1024  # what lies between two layers of a narrow model fits into a core's cache
GPU_BATCH_TOKENS = 8192  # four times as fast as 1,024 on an H100, and 65,536 hardly more (benchmarks/log, gpu)
PASS_TOKENS = 1024  # of a longer window that takes turns with other work
PIECE_TOKENS = 256  # of a window whose keys take turns with a batch of generations, as long as a piece of a prompt
DEFAULT_WINDOW = 1024  # tokens; in longer ones short prompts find their text less often (benchmarks/log, windows)
LOGITS_ROWS = 1024  # positions with their log-probabilities over the vocabulary in RAM at once

_T = TypeVar("_T")
_Pending = tuple[list[int], Callable[[], list[_T]]]  # places of windows, and a call that waits for their results

BLOCK_WINDOWS = 64


def _ignore(place: int) -> None:
    """The default listener."""


class Prediction(NamedTuple):
    """Of the last N positions of a window: keys, log-probabilities of the targets and of the likeliest tokens, and
    optionally final hidden states.
    """

    keys_ND: Float32[np.ndarray, "N D"]
    logprobs_N: Float32[np.ndarray, " N"]
    max_logprobs_N: Float32[np.ndarray, " N"]
    hidden_ND: Float[Tensor, "N D"] | None = None


def _keys(decoder: Decoder, windows: list[Window], tokens_BT: Int64[Tensor, "B T"]) -> list[np.ndarray]:
    keys_BTD = decoder.keys(tokens_BT).half().cpu()
    return [_new_positions(*each).numpy() for each in zip(keys_BTD, windows, strict=True)]


def predictions_of(decoder: Decoder, windows: Sequence[Window], *, hidden: bool = False) -> list[Prediction]:
    """Computes keys and log-probabilities of every window's targets, in float32, optionally with `hidden` states."""
    (predictions,) = _encode_in_parallel(partial(_predictions, hidden=hidden), decoder, [windows])
    return predictions


def _predictions(
    decoder: Decoder, windows: list[Window], tokens_BT: Int64[Tensor, "B T"], *, hidden: bool
) -> list[Prediction]:
    hidden_BTD, keys_BTD = decoder(tokens_BT)
    return [
        _prediction(
            decoder, _new_positions(hidden_TD, window), _new_positions(keys_TD, window), window.targets_N, hidden=hidden
        )
        for window, hidden_TD, keys_TD in zip(windows, hidden_BTD, keys_BTD, strict=True)
    ]


def _prediction(
    decoder: Decoder,
    hidden_ND: Float[Tensor, "N D"],
    keys_ND: Float[Tensor, "N D"],
    targets_N: Int64[np.ndarray, " N"],
    *,
    hidden: bool,
) -> Prediction:
    """Makes the prediction of N positions, a few rows of the large vocabulary at a time."""
    targets_N1 = torch.from_numpy(targets_N)[:, None].to(decoder.device)
    logprobs, max_logprobs = list[Tensor](), list[Tensor]()
    for begin in range(0, len(targets_N), LOGITS_ROWS):
        rows = slice(begin, begin + LOGITS_ROWS)
        logprobs_RV = decoder.logprobs(hidden_ND[rows])
        logprobs.append(logprobs_RV.gather(1, targets_N1[rows])[:, 0])
        max_logprobs.append(logprobs_RV.amax(dim=1))
    logprobs_N, max_logprobs_N = (torch.cat(parts).cpu().numpy() for parts in (logprobs, max_logprobs))
    return Prediction(
        keys_ND.float().cpu().numpy(), logprobs_N, max_logprobs_N, hidden_ND.float().cpu().clone() if hidden else None
    )


class Encoder:
    """Encodes the windows of documents in their order. A segmented model carries its memory from window to window of a
    document. Any other model encodes them in batches.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._state: DecoderState | None = None
        self._skipped: list[Window] = []

    def keys(self, windows: Sequence[Window]) -> list[Float16[np.ndarray, "N D"]]:
        """Computes the keys of every window's new positions, as a datastore stores them, by the cheapest pass."""
        (keys,) = self.keys_of_blocks([windows])
        return keys

    def keys_of_blocks(
        self, blocks: Iterable[Sequence[Window]], on_window: Callable[[int], None] = _ignore
    ) -> Iterator[list[Float16[np.ndarray, "N D"]]]:
        """Computes the keys of blocks of windows. While the caller uses one block, the next is encoded. `on_window` is
        told the place in its block of each window that is done.
        """
        if not self._decoder.config.is_segmented:
            yield from _encode_in_parallel(_keys, self._decoder, blocks, on_window)
            return
        for windows in blocks:
            keys = list[np.ndarray]()
            for place, window in enumerate(windows):
                with torch.inference_mode():
                    keys.append(self._decoder.keys(*self._next(window))[0].half().cpu().numpy())
                on_window(place)
            yield keys

    def predictions(self, windows: Sequence[Window], *, hidden: bool = False) -> list[Prediction]:
        """Computes keys and log-probabilities of every window's targets, as `predictions_of`."""
        if not self._decoder.config.is_segmented:
            return predictions_of(self._decoder, windows, hidden=hidden)
        predictions = []
        with torch.inference_mode():
            for window in windows:
                hidden_BTD, keys_BTD = self._decoder(*self._next(window))
                states = (hidden_BTD[0], keys_BTD[0])
                predictions.append(_prediction(self._decoder, *states, window.targets_N, hidden=hidden))
        return predictions

    def parts(
        self, windows: Sequence[Window], *, hidden: bool = False
    ) -> Iterator[tuple[Int64[np.ndarray, " N"], Prediction] | None]:
        """Yields targets and predictions in pieces, so that the caller can do other work between them.

        None is a piece of a long window that predicts nothing new.
        """
        longest = max((len(window.inputs_T) for window in windows), default=0)
        if self._decoder.config.is_segmented or longest <= PASS_TOKENS:
            for window, read in zip(windows, self.predictions(windows, hidden=hidden), strict=True):
                yield window.targets_N, read
            return
        for window in windows:
            yield from _pieces(self._decoder, window, hidden=hidden)

    def key_parts(self, window: Window) -> Iterator[Float16[np.ndarray, "N D"]]:
        """Yields the keys of one window's new positions in pieces, so that the caller can do other work between them.
        A piece may be empty. The pieces of a segmented model are its segments.
        """
        if self._decoder.config.is_segmented:
            yield from self.keys([window])
            return
        first_new = len(window.inputs_T) - len(window.targets_N)
        state = self._decoder.new_state(capacity=len(window.inputs_T))
        for begin in range(0, len(window.inputs_T), PIECE_TOKENS):
            inputs_T = torch.from_numpy(window.inputs_T[begin : begin + PIECE_TOKENS])
            with torch.inference_mode():
                keys_TD = self._decoder.keys(inputs_T[None], state)[0]
            yield keys_TD[max(0, first_new - begin) :].half().cpu().numpy()

    def skip(self, windows: Sequence[Window]) -> None:
        """Skips windows with known keys. A later window of their document encodes them, if it needs them."""
        for window in windows:
            if not window.continues:
                self._state, self._skipped = None, []
            self._skipped.append(window)

    def _next(self, window: Window) -> tuple[Int64[Tensor, "1 T"], DecoderState]:
        """Returns a window's tokens, and the state after all of its document before it."""
        if not window.continues:
            self._state, self._skipped = None, []
        if self._state is None:
            self._state = self._decoder.new_state()
        for skipped in self._skipped:
            self._decoder.keys(torch.from_numpy(skipped.inputs_T)[None], self._state)
        self._skipped = []
        return torch.from_numpy(window.inputs_T)[None], self._state


def _pieces(
    decoder: Decoder, window: Window, *, hidden: bool
) -> Iterator[tuple[Int64[np.ndarray, " N"], Prediction] | None]:
    """Encodes one window, a piece at a time."""
    inputs_T, first_new = window.inputs_T, len(window.inputs_T) - len(window.targets_N)
    state = decoder.new_state(capacity=len(inputs_T))
    for begin in range(0, len(inputs_T), PASS_TOKENS):
        end = min(begin + PASS_TOKENS, len(inputs_T))
        with torch.inference_mode():
            hidden_BTD, keys_BTD = decoder(torch.from_numpy(inputs_T[begin:end])[None], state)
            if end <= first_new:
                part = None
            else:
                known = max(0, first_new - begin)
                targets_N = window.targets_N[begin + known - first_new : end - first_new]
                states = (hidden_BTD[0, known:], keys_BTD[0, known:])
                part = targets_N, _prediction(decoder, *states, targets_N, hidden=hidden)
        yield part


def document_windows(
    decoder: Decoder, tokens_n: Int64[np.ndarray, " n"], start_id: int, size: WindowSize | None = None
) -> Iterator[Window]:
    """Cuts a document into windows: segments for a segmented model, overlapping windows for any other. A window is as
    long as the model's context by default, and the stride half a window.
    """
    context = decoder.config.context_length
    if decoder.config.is_segmented:
        return segments_of(tokens_n, start_id=start_id, segment=context)
    window, stride = size or WindowSize(context, max(1, context // 2))
    return windows_of(tokens_n, start_id=start_id, context=window, stride=stride)


def window_size(decoder: Decoder, window: int | None = None, stride: int | None = None) -> WindowSize:
    """Returns the size of a datastore's windows. A window is the model's context by default, or 1,024 tokens if that is
    longer. The stride is half a window: each key has seen at least half of one, at twice the cost of encoding once. A
    segmented model encodes nothing twice. Raises InvalidInput for a size that the model cannot have.
    """
    context = decoder.config.context_length
    if decoder.config.is_segmented:
        for name, value in (("window", window), ("stride", stride)):
            if value not in (None, context):
                raise InvalidInput(
                    f"{name} is {value}; a model with memory reads its segments of {context} tokens one after another:"
                    f" leave {name} out",
                    field=name,
                )
        return WindowSize(context, context)
    window = min(context, DEFAULT_WINDOW) if window is None else window
    check_range("window", window, least=1, most=decoder.config.max_length)
    stride = max(1, window // 2) if stride is None else stride
    check_stride(window, stride)
    return WindowSize(window, stride)


def score_tokens(decoder: Decoder, tokens_N: Int64[np.ndarray, " N"], start_id: int) -> Float32[np.ndarray, " N"]:
    """Returns the log-probability of each token of one document under the model alone, with the context that its window
    or the model's memory gives.
    """
    windows = list(document_windows(decoder, tokens_N, start_id))
    scores = [prediction.logprobs_N for prediction in Encoder(decoder).predictions(windows)]
    return np.concatenate([np.empty(0, np.float32), *scores])


def batches_of(windows: Sequence[Window], device: torch.device) -> Iterator[tuple[list[int], Int64[Tensor, "B T"]]]:
    """Yields places of windows of similar length, longest first, with their inputs padded to the longest. A batch has
    as many windows as a device encodes fastest.
    """
    num_tokens = BATCH_TOKENS if device.type == "cpu" else GPU_BATCH_TOKENS
    order = sorted(range(len(windows)), key=lambda place: -len(windows[place].inputs_T))
    while order:
        longest = len(windows[order[0]].inputs_T)
        size = max(1, num_tokens // longest)
        places, order = order[:size], order[size:]
        tokens_BT = torch.zeros(len(places), longest, dtype=torch.int64)
        for row, place in enumerate(places):
            inputs_T = windows[place].inputs_T
            tokens_BT[row, : len(inputs_T)] = torch.from_numpy(inputs_T)
        yield places, tokens_BT


def _encode_in_parallel(
    encode: Callable[[Decoder, list[Window], Tensor], list[_T]],
    decoder: Decoder,
    blocks: Iterable[Sequence[Window]],
    on_window: Callable[[int], None] = _ignore,
) -> Iterator[list[_T]]:
    """Encodes block by block, and the next block while the caller uses one. Runs as many batches at a time as torch has
    threads, each on a core of its own, so that no batch waits for another one's share of a product
    (benchmarks/log/archive.md, "windows on a core each"). A GPU takes one batch at a time.
    """
    num_threads, ahead = torch.get_num_threads(), deque[tuple[int, list[_Pending[_T]]]]()

    @torch.inference_mode()
    def alone(windows: list[Window], tokens_BT: Tensor, share: int) -> list[_T]:
        torch.set_num_threads(share)  # not reset after each batch: MKL's number is that of the whole process
        return encode(decoder, windows, tokens_BT)

    def submit(windows: Sequence[Window]) -> Iterator[_Pending[_T]]:
        batches = list(batches_of(windows, decoder.device))
        share = num_threads // max(1, min(num_threads, len(batches)))
        for places, tokens_BT in batches:
            work = partial(alone, [windows[place] for place in places], tokens_BT, share)
            yield places, work if len(batches) == 1 else pool.submit(work).result

    num_batches = num_threads if decoder.device.type == "cpu" else 1
    with threads(num_threads), ThreadPoolExecutor(num_batches) as pool:
        try:
            for windows in blocks:
                ahead.append((len(windows), list(submit(windows))))
                if len(ahead) > 1:
                    yield _in_order(*ahead.popleft(), on_window)
            while ahead:
                yield _in_order(*ahead.popleft(), on_window)
        finally:
            pool.shutdown(cancel_futures=True)


def _in_order(count: int, pending: list[_Pending[_T]], on_window: Callable[[int], None]) -> list[_T]:
    """Waits for the results of `count` windows and returns them in order."""
    read = dict[int, _T]()
    for places, result in pending:
        read |= zip(places, result(), strict=True)
        for place in places:
            on_window(place)
    return [read[place] for place in range(count)]


def _new_positions(states_TD: Float[Tensor, "T D"], window: Window) -> Float[Tensor, "N D"]:
    """Returns the rows of the positions that predict the window's targets, without the padding behind them."""
    end = len(window.inputs_T)
    return states_TD[end - len(window.targets_N) : end]


def text_windows(checkpoint: Checkpoint, text: str, size: WindowSize | None = None) -> Iterator[Window]:
    """Tokenizes a text and cuts it into windows, by default as long as the model's context."""
    tokens_N = checkpoint.tokenizer.encode(text)
    return document_windows(checkpoint.decoder, tokens_N, checkpoint.tokenizer.start_id, size)


def key_after(checkpoint: Checkpoint, text: str, window: int | None = None) -> Steps[Float32[np.ndarray, "1 D"]]:
    """Returns the key of the end of a text, of which the last `window` tokens count, by default those that fit into the
    model's context. A long text is read in several steps.
    """
    token_ids = yield from checkpoint.tokenizer.encode_steps(text)
    decoder, inputs = checkpoint.decoder, [checkpoint.tokenizer.start_id, *token_ids]
    if decoder.config.max_length is not None:
        inputs = inputs[-(window or decoder.config.max_length) :]
    state = None if len(inputs) <= PASS_TOKENS else decoder.new_state(capacity=len(inputs))
    for begin in range(0, len(inputs), PASS_TOKENS):
        with torch.inference_mode():
            keys_1TD = decoder.keys(torch.tensor([inputs[begin : begin + PASS_TOKENS]]), state)
        if begin + PASS_TOKENS < len(inputs):
            yield None
    key_1D: np.ndarray = keys_1TD[0, -1:].float().cpu().numpy()
    return key_1D
