"""The relative gains of papers, each beside the nearest of our results: a table of docs/reports/evidence.md.

The figures of the papers are those of the tables that are named. Ours come from the reports in this folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from typing import Any

from benchmarks.pages.evidence_rows import Rows, header, line


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
    difference: str
    is_per_word: bool = True  # the paper's perplexity, and not per token of a tokenizer


# Of `smollm2` in WikiText-2's test split: 312,144 tokens, and 245,569 words and ends of lines.
TOKENS_PER_WORD = 312_144 / 245_569
CONTEXT, WIKITEXT, ISABELLE = "context-h100", "evidence-wikitext", "evidence-isabelle"
DATASTORE, CACHE, BOTH = (f"nats_less_{way}" for way in ("datastore", "context_cache", "both"))
LESS = "nats_less"
PAPERS = (
    Paper(
        "kNN-LM", "1911.00172", "table 1", "WikiText-103, store of the training text", 18.65, 16.12,
        WIKITEXT, "wikitext", LESS, "one_lam", "WikiText-2, one λ, 60,000 entries",
        "103 million entries there, of the text that the model was trained on",
    ),
    Paper(
        "kNN-LM", "1911.00172", "table 1", "the same, with a continuous cache", 18.65, 15.79,
        CONTEXT, "WikiText-2", BOTH, "", "WikiText-2, 961,562 entries and the context cache",
        "their window has 3,072 tokens, and ours 512",
    ),
    Paper(
        "kNN-LM", "1911.00172", "table 1", "WikiText-103, the continuous cache alone", 18.65, 18.27,
        CONTEXT, "WikiText-2", CACHE, "", "WikiText-2, the context cache alone",
        "their window has 3,072 tokens, and ours 512",
    ),
    Paper(
        "kNN-LM", "1911.00172", "table 2", "books, store of the training text", 11.89, 10.89,
        "evidence-books", "books", LESS, "one_lam", "books of other authors, one λ, 60,000 entries",
        "their store is the training text of the model. Ours has 12 other books",
        is_per_word=False,
    ),
    Paper(
        "kNN-LM", "1911.00172", "table 4", "a model of Wikipedia with a store of books", 34.84, 20.47,
        ISABELLE, "isabelle", LESS, "adaptive_lam", "Isabelle, adaptive λ, 60,000 entries",
        "their store is the whole training text of the new domain. Ours has 14 documents",
        is_per_word=False,
    ),
    Paper(
        "RetoMaton's kNN-LM", "2201.12431", "card of the model", "WikiText-103, distilgpt2", 18.25, 15.03,
        CONTEXT, "WikiText-2", DATASTORE, "", "WikiText-2, adaptive λ, 961,562 entries",
        "their model was tuned to the text, and its store is a hundred times as large",
        is_per_word=False,
    ),
    Paper(
        "continuous cache", "1612.04426", "WikiText-2", "LSTM", 99.3, 68.9,
        CONTEXT, "WikiText-2", CACHE, "", "WikiText-2, the context cache alone",
        "their model is an LSTM. Ours attends to 512 tokens before the cache",
    ),
    Paper(
        "Memorizing Transformer", "2203.08913", "table 4", "Isabelle, window 512, memory 8,192", 3.09, 2.19,
        CONTEXT, "Isabelle", CACHE, "", "Isabelle, window 512, documents of 8,192 tokens",
        "their model learned with its memory, and ours did not",
        is_per_word=False,
    ),
    Paper(
        "Memorizing Transformer", "2203.08913", "table 4", "PG-19, window 512, memory 8,192", 13.71, 12.29,
        CONTEXT, "books", CACHE, "", "books, window 512, documents of 8,192 tokens",
        "their model learned with its memory, and ours did not",
        is_per_word=False,
    ),
    Paper(
        "RETRO", "2112.04426", "table 4", "WikiText-103, neighbors of Wikipedia", 22.96, 18.97,
        CONTEXT, "WikiText-2", DATASTORE, "", "WikiText-2, adaptive λ, 961,562 entries",
        "a store of 4 billion tokens there, and a model that learned to read it",
    ),
    Paper(
        "in-context RALM", "2302.00083", "table 1", "WikiText-103, GPT-2 of 117 M, BM25 over Wikipedia", 37.5, 29.6,
        "evidence-passages", "wikitext", LESS, "passages", "WikiText-2, passages of 19 other articles",
        "all of Wikipedia there, searched every 4 tokens. 19 articles here, searched every 128 tokens",
    ),
)  # fmt: skip


def table_of_papers(reports: dict[str, Rows]) -> Iterator[str]:
    """A line for each paper. A gain is a share of the perplexity, a word or a token as in the paper."""
    yield from header("paper", "its setting", "its gain", "ours", "our gain", "ours is", "largest difference")
    for paper in PAPERS:
        theirs = 1 - paper.after / paper.before
        tokens = TOKENS_PER_WORD if paper.is_per_word else 1.0
        gain, error = gain_of(nearest(paper, reports[paper.report]), paper.metric, tokens)
        yield line(
            f"{paper.name}, arXiv {paper.arxiv}, {paper.place}",
            f"{paper.setting}: {paper.before} to {paper.after} a {'word' if paper.is_per_word else 'token'}",
            f"{100 * theirs:.1f} %", paper.ours, f"{100 * gain:.1f} ± {100 * error:.1f} %",
            compared(gain, error, theirs), paper.difference,
        )  # fmt: skip


def nearest(paper: Paper, rows: Rows) -> dict[str, Any]:
    """The one row of our report that a paper is compared with."""
    of_all_tokens = [row for row in rows if "nats_per_token" in row and "cut" not in row]
    found = [row for row in of_all_tokens if row.get("text") == paper.text and row.get("way", "") == paper.way]
    assert len(found) == 1, f"{len(found)} results are the nearest to {paper}; expected one"
    return found[0]


def gain_of(row: dict[str, Any], metric: str, tokens: float) -> tuple[float, float]:
    """The share that some nats less a token save of the perplexity a unit of some tokens, and its standard error."""
    kept = exp(-row[metric] * tokens)
    return 1 - kept, kept * row[f"{metric}_error"] * tokens


def compared(gain: float, error: float, theirs: float) -> str:
    """Better or worse by more than two standard errors of ours, or not told apart."""
    if abs(gain - theirs) <= 2 * error:
        return "not told apart"
    return "better" if gain > theirs else "worse"
