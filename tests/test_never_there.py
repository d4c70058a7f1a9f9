"""A datastore from which documents were deleted answers as one that never had them, by every way: difference 0.

Under equal parameters, and where all entries are searched: a build chooses k, λ, the temperature and the lists of an
index by the documents that are there, and a deletion does not choose anew.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from encoders import save_bert
from texts import make_text

from memlm.data.corpus import Corpus, Document
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived import cuts
from memlm.indexing.build import add_to_index, build_index
from memlm.language_model import LanguageModel, load

Read = Callable[[LanguageModel], Any]

GONE = ("doc-2", "doc-5")
QUESTION = "the memory of the model of the page"
MIXED = {"k": 12, "lam": 0.6, "knn_temperature": 3.0}
ASK: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
TURNS = [
    {"role": "user", "content": "the memory of a page?"},
    {"role": "assistant", "content": "a page"},
    {"role": "user", "content": QUESTION},
]


def text_of(number: int) -> str:
    """Of lines, so that a document has several passages, and with a word that no other has."""
    words = make_text(number, 60 + 31 * number).split(" ")
    lines = [" ".join(words[begin : begin + 9]) for begin in range(0, len(words), 9)]
    return f"# Part {number}\n\n" + "\n\n".join(lines) + f"\n\nThe word of it is zebra{number}."


def documents(numbers: range, *, gone: tuple[str, ...] = ()) -> list[Document]:
    made = [Document(f"doc-{n}", text_of(n), f"Document {n}", {"n": str(n)}) for n in numbers]
    return [each for each in made if each.id not in gone]


def written(completion: Any) -> tuple[Any, ...]:
    """All that a caller sees of a text, but its times."""
    return completion.text, completion.tokens, completion.accepted.prompt


def chat(messages: Any, **options: Any) -> Read:
    return lambda lm: written(lm.chat(messages, **ASK, **options).result())


def text(**options: Any) -> Read:
    return lambda lm: written(lm.generate(QUESTION, **{**ASK, **options}).result())


def answer(**options: Any) -> Read:
    def read(lm: LanguageModel) -> Any:
        found = lm.answer(QUESTION, **ASK, **options)
        return found.passages, found.left_out, found.passage_shares, found.prompt, written(found.completion)

    return read


def passages(by: str, question: str = QUESTION) -> Read:
    return lambda lm: lm.find_passages(question, by=by, k=100)


def talk(lm: LanguageModel) -> Any:
    with lm.session() as session:
        return [written(session.chat(text, **ASK).result()) for text in (QUESTION, "and of the stream?")]


WAYS: dict[str, Read] = {
    "passages by words": passages("words"),
    "passages by a word of a deleted document": passages("words", "zebra2 or zebra5 or zebra6, which word?"),
    "passages by meaning": passages("meaning"),
    "passages by auto": passages("auto"),
    "an answer from 1 passage": answer(num_passages=1),
    "an answer from 4 passages": answer(num_passages=4),
    "an answer from a mixture": answer(mixture=True, num_passages=3),
    "an answer beside neighbors": answer(num_passages=2, **MIXED),
    "a chat": chat(QUESTION),
    "a chat of several turns": chat(TURNS, num_passages=2),
    "a chat with neighbors": chat(QUESTION, num_passages=0, neighbors=4, **MIXED),
    "a session": talk,
    "a text with neighbors": lambda lm: written(
        lm.generate(QUESTION, neighbors=8, top_logprobs=4, **ASK, **MIXED).result()
    ),
    "a text with drafts of the datastore": lambda lm: written(lm.generate(QUESTION, drafts=4, **ASK, **MIXED).result()),
    "a score": lambda lm: lm.score(text_of(2)[:400], token_scores=True, **MIXED),
    "a trace": lambda lm: lm.trace(text_of(2)[:300] + text_of(3)[:300], min_tokens=3, spans_per_token=1.0),
    "a search by state": lambda lm: lm.search("notes", QUESTION, k=40),
    "a search by words": lambda lm: lm.search("notes", "the memory", by="words", k=40),
}


def make_stores(folder: Path, model: Path, ends: tuple[int, ...], index: str) -> dict[str, Path]:
    """Stores with deleted documents, without any byte of them, and one that never had them."""
    made = {}
    for name, gone in (("deleted", ()), ("purged", ()), ("never", GONE)):
        made[name] = folder / name / "notes"
        first = Corpus(documents(range(ends[0]), gone=gone))
        build_index(model, first, made[name], index=index, check="none")
        for begin, end in pairwise(ends):
            add_to_index(model, Corpus(documents(range(begin, end), gone=gone)), made[name], check="none")
    for name in ("deleted", "purged"):
        with load(model, [made[name]]) as lm:
            lm.delete_documents(GONE)
    compact(made["purged"], purge=True)
    for path in made.values():
        datastore = Datastore.open(path)
        datastore.save_defaults(replace(datastore.snapshot.defaults, k=12, lam=0.6, temperature=3.0))
    return made


@pytest.fixture(scope="module", autouse=True)
def small_passages() -> Iterator[None]:
    """Of unequal lengths: an encoder cuts long ones off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "LIMIT_TOKENS", 40)
        yield


@pytest.fixture(scope="module", params=[(8,), (4, 8), (3, 4, 6, 8)], ids=lambda ends: f"{len(ends)} segments")
def stores(request: Any, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_stores(tmp_path_factory.mktemp("never"), model_folder, request.param, "Flat")


@pytest.fixture(scope="module")
def opened(
    stores: dict[str, Path], model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, LanguageModel]]:
    encoder = save_bert("no head", tmp_path_factory.mktemp("bert"))
    made = {
        name: load(model_folder, [path], attention_window=44, passage_encoder=encoder) for name, path in stores.items()
    }
    yield made
    for lm in made.values():
        lm.close()


@pytest.mark.parametrize("how", ["deleted", "purged"])
@pytest.mark.parametrize("way", WAYS)
def test_it_answers_as_one_that_never_had_them(opened: dict[str, LanguageModel], way: str, how: str) -> None:
    for lm in opened.values():
        lm.engine.prefixes.clear()  # a prompt that is read again in other pieces has other last bits
    expected = WAYS[way](opened["never"])
    assert expected
    assert not any(name in repr(expected) for name in GONE)
    assert WAYS[way](opened[how]) == expected


@pytest.mark.parametrize("how", ["deleted", "purged"])
def test_an_index_of_lists_does_so_where_all_lists_are_searched(model_folder: Path, tmp_path: Path, how: str) -> None:
    found = {}
    for name, path in make_stores(tmp_path, model_folder, (8,), "IVF4,Flat").items():
        with load(model_folder, [path]) as lm:
            options = {**MIXED, "nprobe": 4}
            completion = lm.generate(QUESTION, neighbors=8, **ASK, **options).result()
            found[name] = written(completion), lm.score(text_of(2)[:200], token_scores=True, **options)
    assert found[how] == found["never"]
