"""The texts that heads are tested on: random tokens repeated, in order and not, and a sentence to find again.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput

ROWS, PERIOD, REPEATS = 8, 25, 4  # as in arXiv 2209.11895: 25 random tokens, repeated 4 times
LEAST_PERIOD = 4
NEEDLE_LENGTH = 256  # tokens of a text with a sentence to find
DEPTHS = (0.2, 0.7)

FACTS = (  # a sentence, the question, and how the answer begins; it goes on as the sentence does
    ("In Lisbon, visitors like to", " eat a warm custard tart and watch the ferries cross the wide river.",
     "What do visitors do in Lisbon?"),
    ("The key of the old observatory lies", " under the blue flower pot beside the northern door of the library.",
     "Where is the key of the observatory?"),
    ("Professor Almeida spent the winter", " drawing maps of frozen lakes for a small museum in Finland.",
     "How did Professor Almeida spend the winter?"),
    ("The baker's secret is to", " add a spoon of honey and let the dough rest until the next morning.",
     "What is the secret of the baker?"),
)  # fmt: skip
FILLER = (
    "The market opens at eight and closes at noon.", "Most of the houses in the valley were built of stone.",
    "A road leads past the mill to the next village.", "In spring the fields are yellow, and in autumn brown.",
    "The train stops here twice a day.", "Children play football behind the school.",
    "Rain fell for three days and then stopped.", "Some people say that the bridge is very old.",
    "The doctor visits on Tuesdays.", "Apples grow on the southern slope, where it is warm.",
    "There is a well in the middle of the square.", "The church has a clock that nobody winds.",
    "Two brothers own the only shop.", "They sell bread, paper, rope and lamps.",
    "At night one can see many stars.", "A dog sleeps in front of the post office.",
    "The river is shallow enough to cross on foot.", "Letters arrive late, but they arrive.",
    "Every summer a circus comes for one week.", "The teacher collects stamps and old coins.",
    "Wood is stacked along the northern walls.", "In winter the road is often closed.",
    "An engineer measured the height of the hill.", "The view from the top is famous.",
)  # fmt: skip


@dataclass(frozen=True)
class RepeatedText:
    """Rows of `prefix` tokens and `repeats` times `period` random ones, all different within a row.

    `in_order` is false for the control, in which each repeat has the same tokens in an order of its own.
    """

    tokens_BT: Int[Tensor, "B T"]
    prefix: int
    period: int
    repeats: int
    in_order: bool = True

    @property
    def length(self) -> int:
        return self.tokens_BT.shape[1]

    @property
    def first_repeated(self) -> int:
        """The position of the second repeat's first token."""
        return self.prefix + self.period

    def chosen(self) -> dict[str, Float[Tensor, "T T"]]:
        """For each score, the earlier places that a repeated token should look at. Each entry is 1 / (scored tokens).

        `induction` is behind each earlier occurrence of the token, `duplicate` the occurrence, `previous` the token
        before, `first` the text's first place.
        """
        T, begin = self.length, self.first_repeated
        chosen = {name: torch.zeros(T, T) for name in ("induction", "duplicate", "previous", "first")}
        for t in range(begin, T):
            earlier = range(t - self.period, self.prefix - 1, -self.period)
            chosen["induction"][t, [s + 1 for s in earlier]] = 1
            chosen["duplicate"][t, list(earlier)] = 1
            chosen["previous"][t, t - 1] = 1
            chosen["first"][t, 0] = 1
        return {name: mask_TT / (T - begin) for name, mask_TT in chosen.items()}

    def shuffled(self, seed: int = 1) -> RepeatedText:
        """The control: the order of each repeat is another one, so that no earlier token says which one follows."""
        generator = torch.Generator().manual_seed(seed)
        tokens_BT = self.tokens_BT.clone()
        for row in tokens_BT:
            for begin in range(self.prefix, self.length, self.period):
                order = torch.randperm(self.period, generator=generator)
                row[begin : begin + self.period] = row[begin : begin + self.period][order]
        return replace(self, tokens_BT=tokens_BT, in_order=False)


def repeated_text(
    ids: Sequence[int], prefix: Sequence[int] = (), *, longest: int | None = None, rows: int = ROWS, seed: int = 0
) -> RepeatedText:
    """Draws rows from `ids` without replacement, behind the tokens of `prefix`.

    The period is 25, or as many as `ids` or a text of `longest` tokens allow. Raises InvalidInput for fewer than four.
    """
    room = PERIOD if longest is None else (longest - len(prefix)) // REPEATS
    period = min(PERIOD, len(ids), room)
    if period < LEAST_PERIOD:
        raise InvalidInput(
            f"a text of {REPEATS} times {LEAST_PERIOD} different tokens is needed to see heads repeat it; the model has"
            f" {len(ids)} tokens and reads {longest}",
            field="model",
        )
    generator, known = torch.Generator().manual_seed(seed), torch.tensor(ids)
    drawn = [known[torch.randperm(len(known), generator=generator)[:period]].repeat(REPEATS) for _ in range(rows)]
    begin = torch.tensor(prefix, dtype=torch.int64)
    return RepeatedText(torch.stack([torch.cat([begin, row]) for row in drawn]), len(prefix), period, REPEATS)


class Needle(NamedTuple):
    """A text whose end repeats a sentence from within it. `answers` are pairs of the position from which a token of the
    end is predicted, and the token's position in the sentence.
    """

    ids: list[int]
    answers: list[tuple[int, int]]


def needles(tokenizer: Tokenizer, longest: int | None) -> Iterator[Needle]:
    """Texts of up to 256 tokens, one for each sentence and depth: filler, a sentence, filler, a question, and the
    sentence as its answer.

    Those that do not fit into `longest` tokens are left out.
    """
    length = min(NEEDLE_LENGTH, longest or NEEDLE_LENGTH)
    filler = tokenizer.encode(" ".join(FILLER * 3)).tolist()
    for begin, rest, question in FACTS:
        opening, rest_ids = (tokenizer.encode(text).tolist() for text in (begin, rest))
        asked = tokenizer.encode(f"\n\nQuestion: {question}\nAnswer: {begin}").tolist()
        head, end = list(tokenizer.special.prefix), tokenizer.encode("\n\n").tolist()
        room = length - len(head) - len(end) - len(opening) - 2 * len(rest_ids) - len(asked)
        for depth in DEPTHS:
            if room >= 0:
                before = round(depth * room)
                context = [*head, *filler[:before], *end, *opening]
                text = [*context, *rest_ids, *filler[before:room], *asked, *rest_ids]
                first = len(text) - len(rest_ids)
                yield Needle(text, [(first + n - 1, len(context) + n) for n in range(len(rest_ids))])
