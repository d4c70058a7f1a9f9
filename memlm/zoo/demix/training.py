"""How a model with experts of domains learns: each path of the corpus is a domain (DEMix, arXiv 2108.05036)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from memlm.data.corpus import Corpus
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.training.data import DocumentStreams, TrainingBatch
from memlm.training.recipe import Recipe
from memlm.zoo.demix.domains import DOMAIN, domains_of


class DomainRecipe(Recipe):
    """A file of tokens for each domain, of which each batch has equally many rows, or one more."""

    def check(self, corpus: Corpus, valid: Corpus | None, tokenizer: Tokenizer | None, *, resumes: bool) -> None:
        """Raises InvalidInput for another number of paths than of domains, for fewer rows, and for held-out text."""
        super().check(corpus, valid, tokenizer, resumes=resumes)
        names = domains_of(self.shape)
        if len(corpus.paths) != len(names) or corpus.documents:
            raise InvalidInput(
                f"the model has the domains {', '.join(names)}, and the corpus {len(corpus.paths)} paths; give a path"
                " for each, in this order",
                field="corpus",
            )
        if self.num_rows < len(names):
            raise InvalidInput(
                f"a step has {self.num_rows} rows for {len(names)} domains; give a batch_size of {len(names)} at least",
                field="batch_size",
            )
        if valid is not None:
            raise InvalidInput(
                "held-out text has no domain; leave --valid out, and score with `memlm.zoo.demix.domains.fix_domain`",
                field="valid",
            )

    def divided(self, corpus: Corpus) -> dict[str, Corpus]:
        """Returns the texts of each domain."""
        return {f"tokens-{number}.u32": replace(corpus, paths=[path]) for number, path in enumerate(corpus.paths)}

    def data(self, files: Sequence[Path], tokenizer: Tokenizer) -> DomainStreams:
        """Returns batches with rows of each domain."""
        counts = [len(range(number, self.num_rows, len(files))) for number in range(len(files))]
        return DomainStreams(
            tuple(self.documents(file, tokenizer, count) for file, count in zip(files, counts, strict=True))
        )


@dataclass(frozen=True)
class DomainStreams:
    """Rows that read a domain each: row n of a step is of domain n modulo their number (section 3.2)."""

    streams: Sequence[DocumentStreams]

    @property
    def steps_per_epoch(self) -> float:
        """Steps that read as many tokens as the longest domain has."""
        return max(stream.steps_per_epoch for stream in self.streams)

    def at(self, step: int, rows: range | None = None) -> TrainingBatch:
        """Returns the batch of a step, or some of its rows."""
        rows = range(sum(stream.batch_size for stream in self.streams)) if rows is None else rows
        places = [divmod(row, len(self.streams)) for row in rows]
        parts = [self.streams[domain].at(step, range(row, row + 1)) for row, domain in places]
        inputs, targets = (torch.cat([getattr(part, name) for part in parts]) for name in ("inputs_BT", "targets_BT"))
        starts = torch.cat([part.starts_BT for part in parts if part.starts_BT is not None])
        domain_B = torch.tensor([1 + domain for _, domain in places])
        return TrainingBatch(inputs, targets, starts, {DOMAIN: domain_B})
