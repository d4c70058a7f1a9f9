"""Cases of the JSON Schema test suite that a constraint answers right, and the time of its masks."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memlm.api.constraint import Constraint
from memlm.data.constrained import TextForms
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput


def bench_suite(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Reads the files of one draft. "too wide" counts wrong texts that are accepted, "too narrow" right ones that are
    not, "refused" the cases of schemas that cannot be compiled. Times are those of the processor.
    """
    forms, outcomes = TextForms(tokenizer), dict[str, Counter[str]]()
    seconds = list[float]()
    for path in sorted(folder.glob("*.json")):
        counts = outcomes[path.stem] = Counter()
        for schema, text, is_valid in _cases(path):
            try:
                accepts = _accepts(forms, schema, text, tokenizer, seconds)
                counts["right" if accepts == is_valid else "too narrow" if is_valid else "too wide"] += 1
            except InvalidInput:
                counts["refused"] += 1
    total = sum(outcomes.values(), Counter())
    return {
        "cases": total.total(),
        **total,
        "mask_us": 1e6 * float(np.median(seconds)),
        "mask_us_99": 1e6 * float(np.quantile(seconds, 0.99)),
        "rows": [{"file": name, **counts} for name, counts in outcomes.items()],
    }


def _cases(path: Path) -> Iterator[tuple[Any, str, bool]]:
    for case in json.loads(path.read_text(encoding="utf-8")):
        for test in case["tests"]:
            yield case["schema"], json.dumps(test["data"], ensure_ascii=False), test["valid"]


def _accepts(forms: TextForms, schema: Any, text: str, tokenizer: Tokenizer, seconds: list[float]) -> bool:
    """Whether a text, and its end, may come token by token."""
    matcher = forms.matcher(Constraint.of(json_schema=schema), tokenizer.end_ids)
    for token_id in [*tokenizer.encode(text).tolist(), tokenizer.end_id]:
        begin_s = time.thread_time()
        mask_V = matcher.mask_V(tokenizer.vocab_size)
        if mask_V[token_id] < 0:
            return False
        matcher.accept(token_id)
        seconds.append(time.thread_time() - begin_s)
    return True
