"""How a model learns: the form of its corpus, the tokens of a step, and other inputs of the decoder.

The recipe of plain models and of models with memory is here. A part of a decoder may name another (`Part.recipe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar

from memlm.base.plugins import load
from memlm.base.progress import Progress
from memlm.data.corpus import Corpus
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.model import Decoder, ModelConfig
from memlm.training.config import TrainConfig
from memlm.training.data import Batches, DocumentStreams, TrainingData

TOKENS_FILE = "tokens.u32"


class Recipe:
    """Windows of a corpus for a plain model, whole documents for one with memory."""

    reads_chunks: ClassVar[bool] = False  # whether it takes a chunk store

    def __init__(self, settings: TrainConfig, shape: ModelConfig) -> None:
        self.settings, self.shape = settings, shape

    def check(self, corpus: Corpus, valid: Corpus | None, tokenizer: Tokenizer | None, *, resumes: bool) -> None:
        """Raises InvalidInput for a run that does not fit the model, before anything is written.

        `tokenizer` is None where the run learns one, and where it resumes.
        """
        if self.shape.reads_source:
            raise InvalidInput(
                "this decoder reads a source beside its text, and documents have none; choose the cross none",
                field="cross",
            )
        if self.settings.chunk_store and not self.reads_chunks:
            raise InvalidInput(
                "a chunk store is for a model with a part that reads it, and this model has none; add one, or leave"
                " chunk_store out",
                field="chunk_store",
            )

    def divided(self, corpus: Corpus) -> dict[str, Corpus]:
        """Returns the texts of each file of tokens, by its name in the run's folder."""
        return {TOKENS_FILE: corpus}

    def prepared(
        self, decoder: Decoder, tokenizer: Tokenizer, progress: Progress
    ) -> AbstractContextManager[object | None]:
        """Returns what the decoder reads beside the corpus, open while it learns."""
        return nullcontext()

    def data(self, files: Sequence[Path], tokenizer: Tokenizer) -> TrainingData:
        """Returns the batches of the files of `divided`, in their order."""
        if self.shape.is_segmented:
            return self.documents(files[0], tokenizer, self.num_rows)
        return Batches(files[0], self.shape.training_length, self.num_rows, self.settings.seed)

    @property
    def num_rows(self) -> int:
        """Rows of a step, of all processes together."""
        return self.settings.batch_size * self.settings.accumulate

    def documents(self, file: Path, tokenizer: Tokenizer, num_rows: int) -> DocumentStreams:
        """Returns rows that read whole documents of a file."""
        return DocumentStreams(
            file, self.shape.training_length, num_rows, self.settings.seed, tokenizer.start_id, tokenizer.end_id
        )


def recipe_of(settings: TrainConfig, shape: ModelConfig) -> Recipe:
    """Returns the recipe that the parts of a model name. Raises InvalidInput for parts of two recipes."""
    named = {part.recipe: part.kind for part in shape.parts if part.recipe}
    if len(named) > 1:
        raise InvalidInput(
            f"the parts {' and '.join(named.values())} learn in ways of their own; leave one out", field="layers"
        )
    kind: type[Recipe] = load(next(iter(named))) if named else Recipe
    return kind(settings, shape)
