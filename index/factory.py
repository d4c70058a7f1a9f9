"""Faiss factory strings that a store may be built with, and the limits of their numbers.

    Flat
    [OPQ<m>[_<width>], | PCA<width>, | PCAR<width>,] IVF<lists>[_HNSW[<links>]], <codes>
    codes: Flat, SQ4, SQ6, SQ8, SQfp16, RaBitQ, PQ<m>[x<bits>]

A string may come from a caller, and Faiss allocates the sizes in it before it trains. So the string is parsed, and its
numbers are compared with the store's width and entries, before Faiss sees it. This module does not import Faiss.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memlm.errors import InvalidInput

FLAT = "Flat"
NO_INDEX = "none"  # of entries that have no keys
MAX_LISTS = 1 << 20
MAX_LINKS = 256  # of a node of HNSW; Faiss takes 32 if none are given
MAX_CODE_BITS = 12  # a product quantizer has 2^bits centroids over the whole width
MAX_SUBSPACES = 4096
MAX_WIDTH = 1 << 16
SUPPORTED = (
    "auto, Flat, or IVF<lists>,<codes> with the codes Flat, SQ4, SQ6, SQ8, SQfp16, RaBitQ, PQ<m> or PQ<m>x<bits>;"
    " IVF<lists>_HNSW<links> finds lists by a graph, and OPQ<m>, OPQ<m>_<width>, PCA<width>, or PCAR<width> may"
    " stand before, with a comma"
)
_NUMBER = r"[1-9][0-9]{0,8}"
_GRAMMAR = re.compile(
    rf"((?P<transform>OPQ|PCAR?)(?P<size>{_NUMBER})(_(?P<width>{_NUMBER}))?,)?"
    rf"IVF(?P<lists>{_NUMBER})(?P<graph>_HNSW(?P<links>{_NUMBER})?)?,"
    rf"(?P<codes>Flat|SQ4|SQ6|SQ8|SQfp16|RaBitQ|PQ(?P<subspaces>{_NUMBER})(x(?P<bits>{_NUMBER}))?)"
)


@dataclass(frozen=True, slots=True)
class Factory:
    """The parts of an inverted file's factory string. `width` is the width of a key in the inverted file, 0 for all of
    it. `opq` and `subspaces` count the parts that a rotation and a product quantizer cut it into, 0 for none.
    """

    text: str
    lists: int
    codes: str
    width: int = 0
    opq: int = 0
    subspaces: int = 0

    @classmethod
    def parse(cls, text: str) -> Factory:
        """Parses a string of the grammar above. Raises InvalidInput, with the supported strings, for any other string
        and for numbers that are too large for any store.
        """
        found = _GRAMMAR.fullmatch(text)
        if found is None or (found["width"] and found["transform"] != "OPQ"):
            raise InvalidInput(f"index is {text[:200]!r}; expected {SUPPORTED}", field="index")
        size, is_opq = int(found["size"] or 0), found["transform"] == "OPQ"
        factory = cls(
            text,
            lists=int(found["lists"]),
            codes=found["codes"],
            width=int(found["width"] or 0) if is_opq else size,
            opq=size if is_opq else 0,
            subspaces=int(found["subspaces"] or 0),
        )
        for what, value, most in (
            ("lists", factory.lists, MAX_LISTS),
            ("links of the graph", int(found["links"] or 0), MAX_LINKS),
            ("dimensions", factory.width, MAX_WIDTH),
            ("subspaces of OPQ", factory.opq, MAX_SUBSPACES),
            ("subspaces of PQ", factory.subspaces, MAX_SUBSPACES),
            ("bits of a code", int(found["bits"] or 0), MAX_CODE_BITS),
        ):
            if value > most:
                raise InvalidInput(
                    f"index is {text!r}, with {value:,} {what}; expected at most {most:,}", field="index"
                )
        return factory

    def check_width(self, dim: int) -> None:
        """Raises InvalidInput if keys of `dim` numbers cannot be transformed or cut up in this way."""
        width = self.width or dim
        if width > dim:
            raise InvalidInput(
                f"index is {self.text!r}, of {width:,} dimensions; the keys have {dim:,}, expected at most that",
                field="index",
            )
        for name, parts in (("OPQ", self.opq), ("PQ", self.subspaces)):
            if parts and width % parts:
                raise InvalidInput(
                    f"index is {self.text!r}, and {name}{parts} does not divide {width:,} dimensions; expected a"
                    " divisor",
                    field="index",
                )

    def check_lists(self, entries: int) -> None:
        """Raises InvalidInput for more lists than entries, because some lists would stay empty."""
        if self.lists > max(1, entries):
            raise InvalidInput(
                f"index is {self.text!r}, and there are about {entries:,} entries; expected at most as many lists, or"
                " auto",
                field="index",
            )


def with_lists_for(text: str, entries: int) -> str:
    """Lowers the number of lists to the entries at most. An added segment may be smaller than the first one."""
    return re.sub(r"IVF(\d+)", lambda lists: f"IVF{min(int(lists[1]), max(1, entries))}", text)


def check_fits(text: str, entries: int, dim: int) -> None:
    """Raises InvalidInput for an index that so many keys of `dim` numbers cannot have."""
    if text not in ("auto", FLAT):
        factory = Factory.parse(text)
        factory.check_lists(entries)
        factory.check_width(dim)


def least_to_train(text: str) -> int:
    """The fewest keys of which Faiss learns an index: one for each center of a product quantizer, and one for each
    dimension that a transform keeps.
    """
    quantizer, transform = re.search(r"PQ\d+(?:x(\d+))?(?![\d_]*,)", text), re.search(r"PCAR?(\d+)", text)
    centers = 1 << int(quantizer[1] or 8) if quantizer else 1
    return max(centers, int(transform[1]) if transform else 1)


def check_factory(text: str) -> None:
    """Raises InvalidInput for an index that no store can have, of any size and width."""
    if text not in ("auto", FLAT):
        Factory.parse(text)
