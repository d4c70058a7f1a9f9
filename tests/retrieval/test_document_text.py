"""A document is read part by part: the parts join to its text, and each says in which line it begins."""

from pathlib import Path

import pytest

from memlm.data.corpus import Document
from memlm.errors import InvalidInput, NotFound
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel, load

TEXTS = {
    "notes/one.md": "The first line.\nThe second: äöü €, 京都.\n\nAfter an empty one 🙂🙂 an end.\n",
    "two.md": "another text\n" * 50,
}


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> LanguageModel:
    store = tmp_path_factory.mktemp("read") / "store"
    documents = [Document(name, text, f"Title of {name}", {"url": "https://a.b/c"}) for name, text in TEXTS.items()]
    build_index(model_folder, documents, store)
    return load(model_folder, [store])


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 4096])
def test_parts_join_to_the_text_and_know_their_lines(lm: LanguageModel, name: str, count: int) -> None:
    text, at = "", 0
    while True:
        part = lm.read_document(name, token_offset=at, num_tokens=count)
        assert part.first_line == 1 + text.count("\n") or not part.text
        assert (part.token_offset, part.document_id, part.title) == (at, name, f"Title of {name}")
        assert part.metadata["url"] == "https://a.b/c"
        text, at = text + part.text, at + part.num_tokens
        assert part.num_tokens == min(count, part.total_tokens - part.token_offset) > 0
        if at == part.total_tokens:
            break
    assert text == TEXTS[name]
    assert lm.read_document(name, token_offset=at + 5).text == ""


def test_a_passage_stands_where_it_says(lm: LanguageModel) -> None:
    (passage,) = lm.find_passages("which line is the second?", k=1, by="words", documents="notes/one.md")
    part = lm.read_document(passage.document_id, token_offset=passage.token_offset, num_tokens=passage.num_tokens)
    assert part.text.strip() == passage.text
    assert part.first_line <= passage.first_line


def test_what_is_not_there_is_not_read(lm: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"three\.md"):
        lm.read_document("three.md")
    with pytest.raises(NotFound):
        lm.read_document("two.md", store="other")
    for options in ({"token_offset": -1}, {"num_tokens": 0}, {"num_tokens": 16_385}):
        with pytest.raises(InvalidInput):
            lm.read_document("two.md", **options)
    with pytest.raises(InvalidInput):
        lm.read_document("")


def test_a_deleted_document_is_not_read(tmp_path: Path, model_folder: Path) -> None:
    build_index(model_folder, [Document(name, text) for name, text in TEXTS.items()], tmp_path / "store")
    with load(model_folder, [tmp_path / "store"]) as lm:
        assert lm.read_document("two.md").text == TEXTS["two.md"]
        lm.delete_documents(["two.md"])
        with pytest.raises(NotFound, match=r"two\.md"):
            lm.read_document("two.md")
