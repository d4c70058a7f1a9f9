"""Texts in this process, from their first token to their last: a batch of their own."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence

from memlm.api.generation import Completion, GenerationEvent, Token
from memlm.base.steps import run_steps
from memlm.generation.batch import Batch
from memlm.generation.generation import Generation
from memlm.generation.mixture import Mixture
from memlm.generation.prefix_cache import PrefixCache
from memlm.generation.step_search import RunningSequence
from memlm.model.files.checkpoint import Checkpoint


def stream(
    checkpoint: Checkpoint, text: Generation | Mixture, prefixes: PrefixCache | None = None
) -> Generator[GenerationEvent, None, None]:
    """Drives one text: yields Accepted, its tokens, and Finished. Raises its failure, and closes it."""
    generations = text.generations if isinstance(text, Mixture) else (text,)
    drawn = text.leader if isinstance(text, Mixture) else text
    try:
        yield drawn.accepted
        for sequence in _steps_of(checkpoint, generations, prefixes, text if isinstance(text, Mixture) else None):
            if sequence.tokens:
                yield sequence.tokens
        assert drawn.finished is not None
        yield drawn.finished
    finally:
        for generation in generations:
            generation.close()


def complete_all(
    checkpoint: Checkpoint, generations: Sequence[Generation], prefixes: PrefixCache | None = None
) -> tuple[Completion, ...]:
    """Drives several generations side by side to their ends. Raises the first failure of any."""
    tokens: dict[Generation, list[Token]] = {generation: [] for generation in generations}
    try:
        for sequence in _steps_of(checkpoint, generations, prefixes):
            tokens[sequence.generation] += sequence.tokens
    finally:
        for generation in generations:
            generation.close()
    return tuple(
        Completion("".join(token.text for token in each), tuple(each), generation.accepted, generation.finished)
        for generation, each in tokens.items()
        if generation.finished is not None
    )


def _steps_of(
    checkpoint: Checkpoint,
    generations: Sequence[Generation],
    prefixes: PrefixCache | None,
    mixture: Mixture | None = None,
) -> Iterator[RunningSequence]:
    """Steps a batch of these generations, or of their mixture, to its end, and yields each sequence after each of its
    steps.
    """
    batch = Batch(
        checkpoint,
        max_sequences=len(generations),
        prefill_tokens=len(generations) * max(len(generation.pending_ids) for generation in generations),
        capacity=max(generation.max_positions for generation in generations),
        prefixes=prefixes,
    )
    if mixture is not None:
        batch.add_mixture(mixture)
    else:
        for generation in generations:
            run_steps(batch.add(generation))
    while len(batch):
        for sequence in batch.step():
            if sequence.failure is not None:
                raise sequence.failure
            if sequence.state is not None:
                run_steps(sequence.generation.commit_to_session(sequence.state))
            yield sequence
            sequence.since_s = time.perf_counter()  # decoding does not include the consumer's time
