"""The relative gains of papers, each beside the nearest of our results: a table of docs/reports/evidence.md.

The figures of the papers are those of the tables that are named. Ours come from the reports in this folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from typing import Any


@dataclass(frozen=True)
class Paper:
    """A row: perplexities of a paper without and with memory, and which result of ours is the nearest."""

    name: str
    arxiv: str
    place: str
    setting: str
    before: float
    after: float
    report: str  # of ours: the name of its file
    text: str
    metric: str
    way: str
    ours: str
    reason: str


CONTEXT, WIKITEXT, ISABELLE = "context-h100", "evidence-wikitext", "evidence-isabelle"
DATASTORE, CACHE, BOTH = (f"nats_less_{way}" for way in ("datastore", "context_cache", "both"))
LESS = "nats_less"
PAPERS = (
    Paper(
        "kNN-LM", "1911.00172", "table 1", "WikiText-103, store of the training text", 18.65, 16.12,
        WIKITEXT, "wikitext", LESS, "one_lam", "WikiText-2, one λ, 60,000 entries",
        "103 million entries there, in a domain that the model was trained on. Our model was not",
    ),
    Paper(
        "kNN-LM", "1911.00172", "table 1", "the same, with a continuous cache", 18.65, 15.79,
        CONTEXT, "WikiText-2", BOTH, "", "WikiText-2, 961,562 entries and the context cache",
        "our window is 512 tokens and theirs 3,072, which leaves their cache less",
    ),
    Paper(
        "kNN-LM", "1911.00172", "table 1", "WikiText-103, the continuous cache alone", 18.65, 18.27,
        CONTEXT, "WikiText-2", CACHE, "", "WikiText-2, the context cache alone",
        "their window of 3,072 tokens contains most of what the cache would find",
    ),
    Paper(
        "kNN-LM", "1911.00172", "table 2", "books, store of the training text", 11.89, 10.89,
        "evidence-books", "books", LESS, "one_lam", "books of other authors, one λ, 60,000 entries",
        "their test books are of the training domain of the model. Ours share no author with the store",
    ),
    Paper(
        "kNN-LM", "1911.00172", "table 4", "a model of Wikipedia with a store of books", 34.84, 20.47,
        ISABELLE, "isabelle", LESS, "adaptive_lam", "Isabelle, adaptive λ, 60,000 entries",
        "their store is the whole training text of the new domain. Ours has 14 documents",
    ),
    Paper(
        "RetoMaton's kNN-LM", "2201.12431", "card of the model", "WikiText-103, distilgpt2", 18.25, 15.03,
        CONTEXT, "WikiText-2", DATASTORE, "", "WikiText-2, adaptive λ, 961,562 entries",
        "a model of similar size, tuned to the text, with a store a hundred times as large",
    ),
    Paper(
        "continuous cache", "1612.04426", "WikiText-2", "LSTM", 99.3, 68.9,
        CONTEXT, "WikiText-2", CACHE, "", "WikiText-2, the context cache alone",
        "an LSTM forgets. Attention to 512 tokens already has much of what a cache gives",
    ),
    Paper(
        "Memorizing Transformer", "2203.08913", "table 4", "Isabelle, window 512, memory 8,192", 3.09, 2.19,
        CONTEXT, "Isabelle", CACHE, "", "Isabelle, window 512, documents of 8,192 tokens",
        "their model learned with its memory. Ours was never trained for it",
    ),
    Paper(
        "Memorizing Transformer", "2203.08913", "table 4", "PG-19, window 512, memory 8,192", 13.71, 12.29,
        CONTEXT, "books", CACHE, "", "books, window 512, documents of 8,192 tokens",
        "prose repeats few passages. A trained memory attends to more than repetitions",
    ),
    Paper(
        "RETRO", "2112.04426", "table 4", "WikiText-103, neighbors of Wikipedia", 22.96, 18.97,
        CONTEXT, "WikiText-2", DATASTORE, "", "WikiText-2, adaptive λ, 961,562 entries",
        "4 billion tokens there, and a trained reader. Ours adds nothing to the model",
    ),
    Paper(
        "in-context RALM", "2302.00083", "table 1", "WikiText-103, GPT-2 of 117 M, BM25 over Wikipedia", 37.5, 29.6,
        "evidence-passages", "wikitext", LESS, "passages", "WikiText-2, passages of 19 other articles",
        "all of Wikipedia there, read anew every 4 tokens. Here a few articles, every 128 tokens, which take two thirds"
        " of the context",
    ),
)  # fmt: skip


def table_of_papers(reports: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """A line for each paper. A gain is a share of the perplexity, and equal is one within two standard errors."""
    columns = "paper", "its setting", "its gain", "ours", "our gain", "ours is", "why"
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for paper in PAPERS:
        theirs = 1 - paper.after / paper.before
        gain, error = gain_of(nearest(paper, reports[paper.report]), paper.metric)
        cells = (
            f"{paper.name}, arXiv {paper.arxiv}, {paper.place}", f"{paper.setting}: {paper.before} to {paper.after}",
            f"{100 * theirs:.1f} %", paper.ours, f"{100 * gain:.1f} ± {100 * error:.1f} %",
            compared(gain, error, theirs), paper.reason,
        )  # fmt: skip
        yield "| " + " | ".join(cells) + " |"


def nearest(paper: Paper, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The one row of our report that a paper is compared with."""
    of_all_tokens = [row for row in rows if "nats_per_token" in row and "cut" not in row]
    found = [row for row in of_all_tokens if row.get("text") == paper.text and row.get("way", "") == paper.way]
    assert len(found) == 1, f"{len(found)} results are the nearest to {paper}; expected one"
    return found[0]


def gain_of(row: dict[str, Any], metric: str) -> tuple[float, float]:
    """The share of the perplexity that some nats less a token save, and its standard error."""
    return 1 - exp(-row[metric]), exp(-row[metric]) * row[f"{metric}_error"]


def compared(gain: float, error: float, theirs: float) -> str:
    """Better, equal or worse."""
    if abs(gain - theirs) <= 2 * error:
        return "equal"
    return "better" if gain > theirs else "worse"
