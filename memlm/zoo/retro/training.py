"""How a model with the cross retro learns: it reads neighbors of a datastore, but none of its own document."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

from memlm.base.progress import Progress
from memlm.data.corpus import Corpus
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.model import Decoder
from memlm.training.data import TrainingData
from memlm.training.recipe import Recipe
from memlm.zoo.retro.datastore_chunks import DatastoreChunks, check_chunk_store


class RetroRecipe(Recipe):
    """Whole documents, whose chunks find neighbors in the `chunk_store`. An adapter learns without one too."""

    reads_chunks: ClassVar[bool] = True

    def check(self, corpus: Corpus, valid: Corpus | None, tokenizer: Tokenizer | None, *, resumes: bool) -> None:
        """Raises InvalidInput where there is no store, or no tokenizer of one. Raises Incompatible for a store of
        another tokenizer, and NotFound or Corrupt where none can be read.
        """
        super().check(corpus, valid, tokenizer, resumes=resumes)
        store = self.settings.chunk_store
        if not store and not self.settings.adapter:
            raise InvalidInput(
                "the cross retro learns to read neighbors, and there are none; give a datastore as chunk_store",
                field="chunk_store",
            )
        if store and tokenizer is not None:  # before the corpus is tokenized
            check_chunk_store(store, tokenizer)
        elif store and not resumes:
            raise InvalidInput(
                "the chunk store has a tokenizer, and training would learn another; give its model as"
                " --init-from, or its folder as --tokenizer",
                field="tokenizer",
            )

    def prepared(
        self, decoder: Decoder, tokenizer: Tokenizer, progress: Progress
    ) -> AbstractContextManager[object | None]:
        """Returns the chunks of the datastore, which the decoder reads from now on."""
        if not self.settings.chunk_store:
            return super().prepared(decoder, tokenizer, progress)
        found = DatastoreChunks(self.settings.chunk_store, decoder, tokenizer, leaves_out_own=True, progress=progress)
        decoder.cross.neighbors = found
        return found

    def data(self, files: Sequence[Path], tokenizer: Tokenizer) -> TrainingData:
        """Returns whole documents, so that a chunk belongs to one."""
        if not self.settings.chunk_store:
            return super().data(files, tokenizer)
        return self.documents(files[0], tokenizer, self.num_rows)
