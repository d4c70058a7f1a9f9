"""Proposals for the prompt of a hole in a repository's file: text of the files around it (RLPG, arXiv 2206.12839).

A proposal is a source (files that stand in some relation to the file with the hole) and a kind (a sort of text of
them). A classifier learns which proposals make the model's loss on the hole smaller. The rules read Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Float64

from memlm.errors import InvalidInput, check_range

Loss: TypeAlias = Callable[[str, str], float]

MOST_FILES = 8  # of a source
NAME = re.compile(r"[A-Za-z_]\w+")
LINE_KINDS = {
    "imports": re.compile(r"^(?:from|import) .*$", re.MULTILINE),
    "names": re.compile(r"^[ \t]*(?:async[ ]def|def|class) .*$", re.MULTILINE),
    "fields": re.compile(r"^[ \t]*(?:self\.)?\w+(?:: .*)? = .*$", re.MULTILINE),
    "strings": re.compile(r"\"[^\"\n]+\"|'[^'\n]+'"),
    "bodies": re.compile(r"^([ \t]*)(?:async[ ]def|def) .*\n(?:(?:\1[ \t]+.*)?\n)+", re.MULTILINE),
}
KINDS = (*LINE_KINDS, "identifiers", "after")
SOURCES = ("current", "imports", "parents", "siblings", "similar")


@dataclass(frozen=True, slots=True)
class Proposal:
    """Text of a source for a prompt. `features` describe it to the classifier."""

    source: str
    kind: str
    text: str
    features: tuple[float, ...]


def proposals(files: Mapping[str, str], path: str, begin: int, end: int) -> tuple[Proposal, ...]:
    """The proposals for the hole from character `begin` to `end` of a file, at most 31 of them.
    The text of the hole is in none of them.

    `files` are the repository's texts by their paths, with slashes. Raises InvalidInput for a path that is not among
    them, and for a hole outside the file.
    """
    if path not in files:
        raise InvalidInput(f"path is {path!r}, which is not among the files", field="path")
    check_range("begin", begin, least=0, most=end, whole=True)
    check_range("end", end, most=len(files[path]), whole=True)
    before, after = files[path][:begin], files[path][end:]
    # Lines that the hole cuts would give half of a name, or join the text before it and behind it.
    whole = before[: before.rfind("\n") + 1] + after[after.find("\n") + 1 :] if "\n" in after else before
    near = set(NAME.findall(before[-1000:] + after[:1000]))
    found = list[Proposal]()
    for source in SOURCES:
        texts = [whole] if source == "current" else [files[each] for each in _files_of(source, files, path, whole)]
        for kind in KINDS:
            text = after if (source, kind) == ("current", "after") else _extracted(kind, texts)
            if text.strip():
                found.append(Proposal(source, kind, text, _features(source, kind, text, near)))
    return tuple(found)


def hole_prompt(proposal_ids: Sequence[int], before_ids: Sequence[int], budget: int) -> list[int]:
    """The tokens of a prompt: those of a proposal, and behind it those before the hole.

    The proposal gets half of the budget, and more where the text before the hole is short. Of the proposal the first
    tokens are kept, of the text before the hole the last ones.
    """
    check_range("budget", budget, least=1, whole=True)
    num_proposed = min(len(proposal_ids), max(budget // 2, budget - len(before_ids)))
    num_before = budget - num_proposed
    return [*proposal_ids[:num_proposed], *(before_ids[-num_before:] if num_before else ())]


@dataclass(frozen=True, slots=True)
class ProposalRanker:
    """A logistic regression on the features of proposals: the probability that one makes the loss smaller."""

    weights_F: Float64[np.ndarray, " F"]
    bias: float

    @classmethod
    def fit(cls, features: Sequence[Sequence[float]], helps: Sequence[bool], *, l2: float = 1.0) -> ProposalRanker:
        """Fits by Newton's method with a penalty of `l2` / 2 times the squared weights. The loss is the binary
        cross-entropy over all proposals. Raises InvalidInput for no proposals.
        """
        if not len(features) or len(features) != len(helps):
            raise InvalidInput(
                f"there are {len(features)} proposals and {len(helps)} labels; give each proposal one", field="helps"
            )
        inputs_NF = np.column_stack([np.asarray(features, np.float64), np.ones(len(features))])
        labels_N: Bool[np.ndarray, " N"] = np.asarray(helps, bool)
        weights_F, penalty_F = np.zeros(inputs_NF.shape[1]), np.full(inputs_NF.shape[1], l2)
        penalty_F[-1] = 1e-6  # the bias is free
        for _ in range(50):
            chances_N = 1 / (1 + np.exp(-inputs_NF @ weights_F))
            gradient_F = inputs_NF.T @ (chances_N - labels_N) + penalty_F * weights_F
            curvature_FF = (inputs_NF.T * (chances_N * (1 - chances_N))) @ inputs_NF + np.diag(penalty_F)
            step_F = np.linalg.solve(curvature_FF, gradient_F)
            weights_F = weights_F - step_F
            if np.abs(step_F).max() < 1e-9:
                break
        return cls(weights_F[:-1], float(weights_F[-1]))

    def chances(self, found: Sequence[Proposal]) -> list[float]:
        """The probability of each proposal to make the loss smaller."""
        return [float(1 / (1 + np.exp(-(self.weights_F @ np.asarray(each.features) + self.bias)))) for each in found]


def helps(loss: Loss, found: Sequence[Proposal], before: str, hole: str) -> list[bool]:
    """Whether each proposal makes the loss of a hole's text smaller than the text before the hole alone. `loss` takes a
    prompt and the text of the hole.
    """
    alone = loss(before, hole)
    return [loss(f"{each.text}\n{before}", hole) < alone for each in found]


def _files_of(source: str, files: Mapping[str, str], path: str, text: str) -> list[str]:
    """The paths of a source, without the file itself."""
    here, others = PurePosixPath(path), [each for each in files if each != path]
    if source == "imports":
        return [each for each in others if _module_of(each) & _imported(text)][:MOST_FILES]
    if source == "parents":
        bases = set(re.findall(r"\w+", " ".join(re.findall(r"^\s*class \w+\((.*)\):", text, re.MULTILINE))))
        defines = re.compile(r"^class (\w+)\b", re.MULTILINE)
        return [each for each in others if bases & {*defines.findall(files[each])}][:MOST_FILES]
    if source == "siblings":
        return [each for each in others if PurePosixPath(each).parent == here.parent][:MOST_FILES]
    parts = {*re.findall(r"[a-z0-9]+", here.stem.lower())} - {"test", "init"}
    return [each for each in others if parts & {*re.findall(r"[a-z0-9]+", PurePosixPath(each).stem.lower())}][
        :MOST_FILES
    ]


def _module_of(path: str) -> set[str]:
    """The dotted names that may stand for a file: with and without the folders above it."""
    parts = PurePosixPath(path).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return {".".join(parts[begin:]) for begin in range(len(parts))}


def _imported(text: str) -> set[str]:
    """The dotted names of imported modules, and of imported names, which may be modules too."""
    names = set(re.findall(r"^\s*import ([\w.]+)", text, re.MULTILINE))
    for module, imported in re.findall(r"^\s*from ([\w.]+) import ([\w, ]+)", text, re.MULTILINE):
        names |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", imported))}
    return names


def _extracted(kind: str, texts: Sequence[str]) -> str:
    """The text of one kind in some files, each piece once."""
    if kind == "after":
        return ""
    if kind == "identifiers":
        return " ".join(dict.fromkeys(name for text in texts for name in NAME.findall(text)))
    return "\n".join(dict.fromkeys(piece for text in texts for piece in _pieces(LINE_KINDS[kind], text)))


def _pieces(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    return (found.group().rstrip() for found in pattern.finditer(text))


def _features(source: str, kind: str, text: str, near: set[str]) -> tuple[float, ...]:
    """The source and the kind, the share of the names near the hole that the text has, and the log of its size."""
    shared = len(near & {*NAME.findall(text)}) / max(1, len(near))
    marks = [*(source == each for each in SOURCES), *(kind == each for each in KINDS)]
    return (*map(float, marks), shared, float(np.log1p(len(text))) / 10)
