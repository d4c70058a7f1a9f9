"""Evidence: which tokens memory helps, by frequency, kind of word, and overlap with the store.

The cuts are those of the critics of kNN-LM: rare tokens (arXiv 2503.22426), and tokens of an n-gram that the datastore
contains against all others (2305.14625, 2408.11815). A few tokens that gain much can hide that most lose a little
(2305.14625), so the tokens that gain and those that lose are counted too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from benchmarks.evidence.domains import ALONE, WAYS, Prepared, ReadText, nats_less, read_test
from benchmarks.per_token import per_token
from memlm.base.progress import Progress
from memlm.data.tokenizer import Tokenizer
from memlm.model.files.checkpoint import Checkpoint

COUNTS = (1, 10, 100)  # times that a token occurs in the datastore
LENGTHS = (2, 4, 8)  # tokens of an n-gram
SAME = 1e-6  # nats: by no more, a token neither gains nor loses
# Articles, prepositions, pronouns, conjunctions and auxiliaries of English.
FUNCTION_WORDS = {
    "a", "about", "all", "also", "an", "and", "any", "are", "as", "at", "be", "been", "but", "by", "can", "could",
    "did", "do", "does", "for", "from", "had", "has", "have", "he", "her", "him", "his", "how", "i", "if", "in",
    "into", "is", "it", "its", "may", "might", "must", "my", "no", "nor", "not", "of", "on", "or", "our", "shall",
    "she", "should", "so", "some", "such", "than", "that", "the", "their", "them", "then", "there", "these",
    "they", "this", "those", "to", "until", "us", "was", "we", "were", "what", "when", "where", "which", "while",
    "who", "will", "with", "would", "you", "your",
}  # fmt: skip


def gain_by_token(checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[dict[str, Any]]:
    """A row for each cut and way, and one for all tokens: the share of the tokens, nats fewer than the model alone, and
    the shares of the cut's tokens that are more and less probable than alone.
    """
    texts, tokenizer = read_test(checkpoint, prepared, progress), checkpoint.tokenizer
    stored = [tokenizer.encode(document.text).astype(np.int64) for document in prepared.domain.stored]
    counts_V = np.bincount(np.concatenate(stored), minlength=tokenizer.vocab_size)
    known = [{gram for ids_N in stored for gram in grams_of(ids_N, length)} for length in LENGTHS]
    cuts: dict[str, Callable[[ReadText], list[str]]] = {
        "all": lambda text: ["tokens"] * len(text.read.targets_N),
        "frequency": lambda text: [frequency(int(count)) for count in counts_V[text.read.targets_N]],
        "word": lambda text: word_classes(text.read.targets_N.tolist(), tokenizer),
        "overlap": lambda text: overlaps(text.read.targets_N, known),
    }
    rows, tokens = [], sum(len(text.read.targets_N) for text in texts)
    for cut, labels_of in cuts.items():
        labels = [np.array(labels_of(text)) for text in texts]
        for label in sorted(set(np.concatenate(labels).tolist())):
            masks = [labels_N == label for labels_N in labels]
            counts = [int(mask_N.sum()) for mask_N in masks]
            words = {"text": prepared.domain.name, "cut": f"{cut} {label}", "share_of_tokens": sum(counts) / tokens}
            words["documents"] = sum(count > 0 for count in counts)
            rows += [
                {**words, "way": way, **nats_less(texts, way, masks), **shares_of(texts, way, masks)} for way in WAYS
            ]
    return rows


def shares_of(texts: Sequence[ReadText], way: str, masks: Sequence[Bool[np.ndarray, " N"]]) -> dict[str, float]:
    """Shares of the marked tokens whose log-probability one way raises and lowers, with standard errors over documents.
    Both leave out the tokens that it changes by at most 1e-6.
    """
    more = [(text.logprobs[way] - text.logprobs[ALONE])[mask_N] for text, mask_N in zip(texts, masks, strict=True)]
    sizes_D = np.array([len(more_N) for more_N in more])
    counted = {
        "gaining": [(more_N > SAME).sum() for more_N in more],
        "losing": [(more_N < -SAME).sum() for more_N in more],
    }
    shares = dict[str, float]()
    for name, count_D in counted.items():
        share, error = per_token(np.array(count_D, np.float64), sizes_D)
        shares |= {f"share_{name}": share, f"share_{name}_error": error}
    return shares


def frequency(count: int) -> str:
    """The class of a token that occurs so often in the datastore."""
    if count < COUNTS[0]:
        return "0"
    least = max(each for each in COUNTS if each <= count)
    return f"{least}+" if least == COUNTS[-1] else f"{least}-{10 * least - 1}"


def grams_of(ids_N: Int64[np.ndarray, " N"], length: int) -> list[bytes]:
    """The n-grams of tokens, as bytes."""
    return [ids_N[begin : begin + length].tobytes() for begin in range(len(ids_N) - length + 1)]


def overlaps(ids_N: Int64[np.ndarray, " N"], known: Sequence[set[bytes]]) -> list[str]:
    """For each token, the longest of the lengths whose n-gram that ends with the token is known, as `4 tokens`."""
    labels = ["none"] * len(ids_N)
    for length, grams in zip(LENGTHS, known, strict=True):
        for begin, gram in enumerate(grams_of(ids_N, length)):
            if gram in grams:
                labels[begin + length - 1] = f"{length} tokens"
    return labels


def word_classes(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The class of the word that holds the last character of each token: number, name, function word, other word, or
    sign. A name begins with a capital letter, also at the beginning of a sentence.
    """
    ends_N = np.cumsum(tokenizer.characters[np.asarray(ids)]) - tokenizer.prepends_space
    text = tokenizer.decode(list(ids))
    return [class_of(_word_around(text, min(int(end), len(text)) - 1)) for end in ends_N]


def _word_around(text: str, place: int) -> str:
    """The word around a character, or the character alone if it belongs to none."""
    if place < 0 or not text[place].isalnum():
        return text[max(0, place) : place + 1]
    begin, end = place, place + 1
    while begin > 0 and text[begin - 1].isalnum():
        begin -= 1
    while end < len(text) and text[end].isalnum():
        end += 1
    return text[begin:end]


def class_of(word: str) -> str:
    """The class of a word: number, sign, function word, name, or other word."""
    if any(letter.isdigit() for letter in word):
        return "number"
    if not word[:1].isalpha():
        return "sign"
    if word.lower() in FUNCTION_WORDS:
        return "function word"
    return "name" if word[0].isupper() else "other word"
