"""The drafts of one text: proposals of its sources, their part in the next pass, and their success."""

from __future__ import annotations

from collections.abc import Sequence

from memlm.api.generation import DraftSource, DraftUsage
from memlm.generation.drafts.budget import DraftBudget, Survival
from memlm.generation.drafts.sources import LONGEST_DRAFT, Draft, Drafter
from memlm.retrieval.result import RetrievalResult
from memlm.retrieval.store import ModelStore


class Drafts:
    """The draft that the next pass reads behind the last token, if there is one, and the counts of those before.

    `stores` are the datastores that the text and its drafts depend on.
    """

    def __init__(
        self,
        budget: DraftBudget,
        stores: Sequence[ModelStore],
        drafter: Drafter | None,
        *,
        asked: int | None,
        max_tokens: int,
    ) -> None:
        """Without a `drafter` there are none. `asked` is the length that the request names, `max_tokens` the text's."""
        self.stores, self._survival = stores, Survival(budget.experience(stores).survival)
        self._drafter, self._asked, self._num_left = drafter, asked, max_tokens
        self._draft: Draft | None = None
        self._counts: dict[DraftSource, tuple[int, int, int]] = {}

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens of the draft."""
        return () if self._draft is None else self._draft.token_ids

    @property
    def is_forced(self) -> bool:
        """Whether all tokens of a draft are to be read at any cost."""
        return self._asked is not None

    @property
    def usages(self) -> tuple[DraftUsage, ...]:
        """The success of the drafts of each source."""
        return tuple(DraftUsage(source.value, *counts) for source, counts in sorted(self._counts.items()))

    def propose(self, room: int) -> list[float]:
        """Sets the best draft of at most `room` tokens. Returns how likely each token is to be accepted along with all
        before it.
        """
        self._draft, chances = None, list[float]()
        count = min(room, self._asked or LONGEST_DRAFT, self._num_left - 1)
        if self._drafter is not None and count > 0:
            for draft in self._drafter.drafts(count):
                expected = self._survival.chances(draft)
                if sum(expected) > sum(chances):
                    self._draft, chances = draft, expected
        return chances

    def shorten(self, length: int) -> None:
        """Keeps the first tokens of the draft."""
        if self._draft is not None:
            self._draft = self._draft._replace(token_ids=self._draft.token_ids[:length]) if length else None

    def append(self, token_id: int, result: RetrievalResult | None) -> None:
        """Follows the text by a token, which was sampled with these neighbors."""
        self._num_left -= 1
        if self._drafter is not None:
            self._drafter.append(token_id, result)

    def settle(self, num_accepted: int) -> None:
        """Counts how many tokens of the draft are part of the text. The next pass reads another one, or none."""
        draft, self._draft = self._draft, None
        if draft is None or not draft.token_ids:
            return
        self._survival.add(draft, num_accepted)
        drafted, accepted, drafts = self._counts.get(draft.source, (0, 0, 0))
        self._counts[draft.source] = drafted + len(draft.token_ids), accepted + num_accepted, drafts + 1
