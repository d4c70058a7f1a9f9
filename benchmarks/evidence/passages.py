"""Evidence: text predicted with a datastore, and with passages of its documents in the prompt.

Passages are found by BM25, as `memlm answer` finds them, and stand before the text (in-context retrieval,
arXiv 2302.00083). Text with passages before it reads no more tokens than text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.evidence.domains import Prepared, differences, logprobs_of
from benchmarks.evidence.texts import Domain
from benchmarks.per_token import per_token
from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress
from memlm.data.windows import Window
from memlm.errors import InvalidInput
from memlm.indexing.option_trials import EncodedText
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.encoder import BLOCK_WINDOWS, Encoder
from memlm.retrieval.retriever import Retriever

CHUNK, CONTEXT, ROOM = 128, 384, 256  # tokens: predicted at once, read before them, of these for passages
QUERY_TOKENS = 32  # the end of the text before a chunk
NUM_PASSAGES = 4  # found; those that fit into the room are taken
PAIRS = (("datastore", "passages"), ("both", "datastore"), ("both", "passages"))


def passages(checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[dict[str, Any]]:
    """A row for each way of predicting the test documents, 128 tokens at a time, from 384 tokens: those before, or the
    128 before behind passages. `both` searches the datastore with the passages in the prompt. The first 384 tokens of a
    document are not predicted, and shorter documents are left out. The rows of `passages-differences` compare two ways.
    """
    nats: dict[str, list[float]] = {}
    sizes = list[int]()
    with LanguageModel(checkpoint, [prepared.store]) as lm:
        retriever = lm.engine.stores.retriever(RetrievalParams(context_cache=0))
        assert retriever is not None  # a datastore is loaded
        for number, document in enumerate(prepared.domain.test):
            if len(ids := lm.tokenize(document.text)) > CONTEXT:
                found = _nats_of(lm, retriever, ids)
                sizes.append(found.pop("tokens"))
                for way, each in found.items():
                    nats.setdefault(way, []).append(each)
            progress("score", number + 1, len(prepared.domain.test))
    rows, sizes_D = list[dict[str, Any]](), np.array(sizes)
    sums = {way: np.array(each) for way, each in nats.items()}
    for way, nats_D in sums.items():
        level, level_error = per_token(nats_D, sizes_D)
        less, error = per_token(sums["alone"] - nats_D, sizes_D)
        figures = {"nats_per_token": level, "nats_per_token_error": level_error}
        figures |= {"nats_less": less, "nats_less_error": error}
        rows.append({"text": prepared.domain.name, "way": way, "documents": len(sizes), **figures})
    return rows + differences("passages", prepared.domain.name, sums, sizes_D, PAIRS)


def check_passages(checkpoint: Checkpoint, domain: Domain) -> None:
    """Raises InvalidInput for a model or documents that are too short for this table."""
    check_lengths(checkpoint, domain, window=CONTEXT + CHUNK, document=CONTEXT + 1)


def check_lengths(checkpoint: Checkpoint, domain: Domain, *, window: int, document: int) -> None:
    """Raises InvalidInput for a model whose context is shorter than a window, and where no test document has as many
    tokens as are expected of one.
    """
    context = checkpoint.decoder.config.context_length
    if window > context:
        raise InvalidInput(
            f"the model's context has {context} tokens; expected {window} or more, so give another model, or name other"
            " tables with only",
            field="model",
        )
    longest = max(len(checkpoint.tokenizer.encode(each.text)) for each in domain.test)
    if longest < document:
        raise InvalidInput(
            f"no test document of {domain.name} has {document} tokens, and the longest has {longest}; raise"
            " document_tokens, or give longer texts",
            field="document_tokens",
        )


def windows_of(lm: LanguageModel, ids: Sequence[int]) -> tuple[list[Window], list[Window]]:
    """The windows of each chunk of a document that has a whole context before it: of text alone, and with passages."""
    plain, augmented = list[Window](), list[Window]()
    for begin in range(CONTEXT, len(ids), CHUNK):
        before, targets = ids[begin - CONTEXT : begin], ids[begin : begin + CHUNK]
        plain.append(window_of(lm, before, targets))
        found = passage_tokens(lm, lm.detokenize(before[-QUERY_TOKENS:]))
        augmented.append(window_of(lm, [*found, *before[ROOM:]], targets))
    return plain, augmented


def _nats_of(lm: LanguageModel, retriever: Retriever, ids: Sequence[int]) -> dict[str, Any]:
    """Nats of a document in each way, and the number of its tokens that are predicted."""
    plain, augmented = windows_of(lm, ids)
    sums: dict[str, Any] = {"tokens": sum(len(window.targets_N) for window in plain)}
    for windows, names in ((plain, ("alone", "datastore")), (augmented, ("passages", "both"))):
        read = read_windows(lm.checkpoint, windows)
        mixed_N = logprobs_of(read, retriever.search(read.keys_ND, read.max_logprobs_N))
        for name, logprobs_N in zip(names, (read.lm_logprobs_N, mixed_N), strict=True):
            sums[name] = -float(logprobs_N.sum(dtype=np.float64))
    return sums


def passage_tokens(lm: LanguageModel, query: str) -> list[int]:
    """The tokens of the best passages for a query by BM25, the best last, at most as many as there is room for."""
    taken = list[int]()
    for passage in lm.find_passages(query, k=NUM_PASSAGES):
        ids = lm.tokenize(f"{passage.text}\n\n")
        if len(ids) + len(taken) <= ROOM:
            taken = [*ids, *taken]
    return taken


def window_of(lm: LanguageModel, before: Sequence[int], targets: Sequence[int]) -> Window:
    """A window that reads the start of a text, the tokens before, and the targets, and predicts the targets."""
    inputs = [lm.checkpoint.tokenizer.start_id, *before, *targets[:-1]]
    return Window(np.array(inputs), np.array(targets))


def read_windows(checkpoint: Checkpoint, windows: Sequence[Window]) -> EncodedText:
    """Reads windows: the keys, targets and log-probabilities of all of them, in their order."""
    encoder, parts = Encoder(checkpoint.decoder), list[EncodedText]()
    for begin in range(0, len(windows), BLOCK_WINDOWS):
        block = windows[begin : begin + BLOCK_WINDOWS]
        parts += map(EncodedText.of, block, encoder.predictions(block))
    return EncodedText.joined(parts)
