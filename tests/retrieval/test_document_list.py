"""Documents are listed by their ids: each once, whatever segment it is in, and none that was deleted."""

from pathlib import Path

import pytest

from memlm.api.documents import DocumentInfo, ListDocumentsRequest
from memlm.data.corpus import Document
from memlm.errors import InvalidInput, NotFound
from memlm.index.store import documents as tables
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel, load

IDS = sorted(["a.md", "b/1.md", "b/2.md", "é.md", "🙂.md", "\uffee.md", "zz.md"])


@pytest.fixture
def lm(tmp_path: Path, model_folder: Path) -> LanguageModel:
    """Of three segments, in none of which the ids follow each other."""
    build_index(
        model_folder, [Document(each, f"text of {each}", each.upper()) for each in IDS[::3]], tmp_path / "store"
    )
    lm = load(model_folder, [tmp_path / "store"])
    for each in (*reversed(IDS[1::3]), *IDS[2::3]):
        lm.remember(f"text of {each}", document_id=each, title=each.upper())
    return lm


def listed(lm: LanguageModel, page_size: int) -> list[DocumentInfo]:
    found, token = list[DocumentInfo](), ""
    while True:
        page = lm.ask(ListDocumentsRequest(page_size=page_size, page_token=token))
        assert len(page.documents) <= page_size
        found += page.documents
        if not (token := page.next_page_token):
            return found


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("at_once", [1, 2, 500])
def test_pages_hold_each_live_document_once_in_order(
    lm: LanguageModel, page_size: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MOST_AT_ONCE", at_once)
    found = listed(lm, page_size)
    assert [each.id for each in found] == IDS
    assert [each.title for each in found] == [each.upper() for each in IDS]
    assert all(each.num_tokens == lm.read_document(each.id).total_tokens for each in found)
    lm.delete_documents([IDS[0], IDS[3], IDS[-1]])
    assert [each.id for each in listed(lm, page_size)] == [
        each for each in IDS if each not in (IDS[0], IDS[3], IDS[-1])
    ]


def test_an_empty_list_is_a_page_and_a_wrong_token_is_refused(lm: LanguageModel) -> None:
    with pytest.raises(InvalidInput, match="page_token"):
        lm.ask(ListDocumentsRequest(page_token="x"))
    with pytest.raises(NotFound):
        lm.ask(ListDocumentsRequest("other"))
    lm.delete_documents(IDS)
    assert listed(lm, 3) == []
