"""Drafts tell a caller nothing about datastores that the caller does not search: neither by lookups, nor by timing."""

import gc
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from memlm.api.generation import DraftUsage
from memlm.data.corpus import Corpus
from memlm.generation.drafts import budget as draft_budget
from memlm.generation.drafts.budget import DraftBudget, PassCost
from memlm.index.store.snapshot import Snapshot
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import load_checkpoint
from memlm.model.kernels.native import library
from memlm.retrieval.store import ModelStore

PROMPT = "a model can be read, a model can"
MEMORY = {"k": 40, "lam": 0.7}


@pytest.fixture(scope="module")
def stores(
    store_folder: Path, model_folder: Path, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """An open and a secret datastore of equal contents, and a secret one without keys."""
    folders = [tmp_path_factory.mktemp("rights") / name for name in ("open", "secret")]
    for folder in folders:
        shutil.copytree(store_folder, folder)
    folders.append(tmp_path_factory.mktemp("rights") / "keyless")
    build_index(model_folder, Corpus([corpus_folder]), folders[-1], keys="none")
    return folders


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each pass. In place of its time, a pass takes as long as its rows say, so that texts are alike."""
    found, add = list[int](), PassCost.add

    def timed(self: PassCost, num_rows: int, seconds: float) -> None:
        found.append(num_rows)
        add(self, num_rows, 1 + 0.3 * num_rows)

    monkeypatch.setattr(PassCost, "add", timed)
    return found


def open_all(model_folder: Path, stores: Sequence[Path]) -> LanguageModel:
    return LanguageModel(load_checkpoint(model_folder, dtype="int8"), stores)


def seen_by_a_caller(lm: LanguageModel, sizes: list[int], **options: Any) -> list[tuple[int, tuple[DraftUsage, ...]]]:
    """What the times of three answers depend on: steps, drafts by source, and rows of each pass."""
    sizes.clear()
    usages = [
        lm.generate(PROMPT, seed=seed, temperature=temperature, max_tokens=28, **options).result().finished.usage
        for seed, temperature in ((1, 0), (2, 0.5), (3, 0))
    ]
    return [(usage.steps, usage.drafts) for usage in usages] + [(size, ()) for size in sizes]


def use_much(lm: LanguageModel, **options: Any) -> None:
    for seed in range(8):
        lm.generate(PROMPT, seed=seed, temperature=seed % 2, max_tokens=28, **options).result()


@pytest.mark.parametrize("own", [{"use_store": False}, {"store": "open", **MEMORY}])
@pytest.mark.skipif(library() is None, reason="without the native kernels no draft pays here, so none is made")
def test_what_a_caller_sees_does_not_depend_on_a_datastore_of_others(model_folder, stores, sizes, own):
    secrets: list[dict[str, Any]] = [{"store": "secret", **MEMORY}, {"stores": ["open", "secret"], **MEMORY}]
    secrets.append({"store": "keyless"})
    with open_all(model_folder, stores[:1]) as lm:
        expected = seen_by_a_caller(lm, sizes, **own)
    assert any(drafts for _, drafts in expected)
    with open_all(model_folder, stores) as lm:
        assert seen_by_a_caller(lm, sizes, **own) == expected
    for options in secrets:
        with open_all(model_folder, stores) as lm:
            use_much(lm, **options)
            assert seen_by_a_caller(lm, sizes, **own) == expected, options
    with open_all(model_folder, stores) as lm:  # so many trials of the caller's own would be seen
        use_much(lm, **own)
        assert seen_by_a_caller(lm, sizes, **own) != expected


def test_no_lookup_of_a_caller_touches_a_datastore_of_others(model_folder, stores, monkeypatch):
    touched = list[object]()

    def record(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def recorded(self: Any, *arguments: Any, **options: Any) -> Any:
            touched.append(self)
            return original(self, *arguments, **options)

        monkeypatch.setattr(kind, name, recorded)

    for kind, name in ((ModelStore, "search"), (ModelStore, "passage_after"), (Snapshot, "tokens_after")):
        record(kind, name)
    with open_all(model_folder, stores) as lm:
        own, others = (lm.engine.stores.model_store(name) for name in ("open", "secret"))
        lm.generate(PROMPT, drafts=8, max_tokens=28, seed=1, store="open", **MEMORY).result()
        assert {*touched} == {own, own.snapshot}
        touched.clear()
        lm.generate(PROMPT, drafts=8, max_tokens=28, seed=1, use_store=False).result()
        assert not touched
        lm.generate(PROMPT, drafts=8, max_tokens=28, seed=1, store="secret", **MEMORY).result()
        assert {*touched} == {others, others.snapshot}


def test_an_experience_belongs_to_a_set_of_datastores_and_goes_with_them(model_folder, stores, monkeypatch):
    budget = DraftBudget()
    with open_all(model_folder, stores) as lm:
        one, other = (lm.engine.stores.model_store(name) for name in ("open", "secret"))
        both = budget.experience([one, other])
        assert budget.experience([other, one]) is both
        assert len({id(budget.experience(each)) for each in ((), [one], [other])} | {id(both)}) == 4
    monkeypatch.setattr(draft_budget, "MOST_SETS", 2)
    budget = DraftBudget()
    alone = budget.experience(())
    for _ in range(5):  # stores that come and go
        with open_all(model_folder, stores[:1]) as lm:
            budget.experience([lm.engine.stores.model_store()])
            assert budget.experience(()) is alone
        del lm
        gc.collect()
    assert len(budget._experiences) == 2
