"""Text for the tests: sentences of few words, so that there is something to remember."""

import random

WORDS = [
    "the",
    "memory",
    "of",
    "a",
    "model",
    "can",
    "be",
    "read",
    "and",
    "edited",
    "while",
    "it",
    "serves;",
    "delete",
    "a",
    "page,",
    "and",
    "it",
    "is",
    "silent:",
    "é",
    "猫",
    "🙂",
]


def make_text(seed: int, num_words: int) -> str:
    """Sentences of few words, so that there is something to remember."""
    rng = random.Random(seed)
    words = [rng.choice(WORDS) for _ in range(num_words)]
    return " ".join(word + ("\n" if rng.random() < 0.25 else "") for word in words)
