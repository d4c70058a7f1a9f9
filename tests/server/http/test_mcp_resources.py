"""A resource is read whole or by its lines, in parts of any size, and says where it goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from memlm.api.answers import AnswerRequest
from memlm.data.corpus import Document
from memlm.errors import Cancelled, InvalidInput
from memlm.indexing.build import build_index
from memlm.language_model import load
from memlm.server.http.mcp import resources
from memlm.server.http.mcp.stdio import LocalHost
from memlm.server.http.mcp.uris import DocumentUri, parse_uri, uri_of

TEXTS = {
    "a.md": "".join(f"line {number} äöü\n" for number in range(1, 41)),
    "no end.md": "one\n\ntwo\nthree",
    "one line.md": "word " * 200,
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[LocalHost]:
    store = tmp_path_factory.mktemp("read") / "notes"
    build_index(model_folder, [Document(name, text) for name, text in TEXTS.items()], store)
    with load(model_folder, [store]) as lm, ThreadPoolExecutor(1) as threads:
        yield LocalHost(lm, threads)


@pytest.mark.parametrize("part_tokens", [5, 4096])
@pytest.mark.parametrize("name", TEXTS)
async def test_lines_are_those_of_the_text(
    host: LocalHost, name: str, part_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "MAX_PART_TOKENS", part_tokens)
    monkeypatch.setattr(resources, "MAX_PARTS", 10_000)
    text = TEXTS[name]
    assert await resources.read_document(host, uri_of("notes", name)) == text
    lines = text.splitlines(keepends=True)
    for first in range(1, len(lines) + 1, 7):
        for last in (first, first + 1, first + 5, 10_000):
            read = await resources.read_document(host, uri_of("notes", name, first, last))
            assert read == "".join(lines[first - 1 : last]), (first, last)
    with pytest.raises(InvalidInput, match="uri has the line 500; the document has"):
        await resources.read_document(host, uri_of("notes", name, 500, 501))


@pytest.mark.parametrize("most", [20, 100, 350])
@pytest.mark.parametrize("part_tokens", [7, 4096])
async def test_whoever_reads_on_has_read_all(
    host: LocalHost, most: int, part_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "MAX_CHARACTERS", most)
    monkeypatch.setattr(resources, "MAX_PART_TOKENS", part_tokens)
    monkeypatch.setattr(resources, "MAX_PARTS", 10_000)
    read, uri = "", uri_of("notes", "a.md")
    while uri:
        shown = await resources.read_document(host, uri)
        on = re.search(r"\n\[The document goes on. Read (\S+) for more.\]\n\Z", shown)
        part = shown[: on.start()] if on else shown
        assert 0 < len(part) <= most
        read, uri = read + part, on[1] if on else ""
    assert read == TEXTS["a.md"]


async def test_a_line_that_is_too_long_is_cut(host: LocalHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "MAX_CHARACTERS", 100)
    shown = await resources.read_document(host, uri_of("notes", "one line.md"))
    note = "[Line 1 is longer than this. memlm:notes/one%20line.md#L2-L1001 has the lines behind it, if there are any.]"
    assert shown == f"{'word ' * 20}\n{note}\n"


async def test_lines_too_far_on_are_refused(host: LocalHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "MAX_PART_TOKENS", 1)
    monkeypatch.setattr(resources, "MAX_PARTS", 5)
    with pytest.raises(InvalidInput, match="uri has the line 30, which is too far on; search the document"):
        await resources.read_document(host, uri_of("notes", "a.md", 30, 31))


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("stores_a_page", [1, 2, 16])
async def test_pages_go_through_all_datastores(
    tmp_path: Path, model_folder: Path, page_size: int, stores_a_page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "PAGE_SIZE", page_size)
    monkeypatch.setattr(resources, "STORES_A_PAGE", stores_a_page)
    ids = {"a": ["1", "2", "3"], "b": [], "c": ["1"], "d": [], "e": ["1", "2"], "f": []}
    for store, names in ids.items():
        documents = [Document(name, "text") for name in names or ["gone"]]
        build_index(model_folder, documents, tmp_path / store, keys="none", check="none")
    with load(model_folder, [tmp_path / store for store in ids]) as lm, ThreadPoolExecutor(1) as threads:
        for store, names in ids.items():
            if not names:
                lm.delete_documents(["gone"], store=store)
        found, cursor = list[str](), ""
        while True:
            page = await resources.list_documents(LocalHost(lm, threads), cursor)
            assert len(page.documents) <= page_size
            found += [each.name for each in page.documents]
            if not (cursor := page.cursor):
                break
    assert found == [f"{store}/{name}" for store, names in ids.items() for name in names]


@pytest.mark.parametrize("store", ["notes", "a.b-c_d"])
@pytest.mark.parametrize("document_id", ["a", "a/b.md", "a b", "ä?#%&.md", "//x", "a\nb", "%41", "memlm:x/y"])
def test_a_uri_names_the_document_that_it_was_made_of(store: str, document_id: str) -> None:
    assert parse_uri(uri_of(store, document_id)) == DocumentUri(store, document_id)
    assert parse_uri(uri_of(store, document_id, 3, 9)) == DocumentUri(store, document_id, 3, 9)
    assert uri_of(store, document_id).isprintable()


async def test_an_answer_that_nobody_waits_for_ends_at_its_next_token(host: LocalHost) -> None:
    """So that the next call of the agent has its turn."""
    has_left = Event()
    has_left.set()
    with pytest.raises(Cancelled, match="no longer waits"):
        host._answer(AnswerRequest("Which line?", num_passages=0), has_left)
