"""Which documents of a store a search looks at: by their ids and their metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memlm.index.store.document_names import is_named

if TYPE_CHECKING:
    from memlm.index.store.documents import DocumentRow


@dataclass(frozen=True, slots=True)
class DocumentFilter:
    """Chooses the documents that match any of the `documents`, if there are some, and all of the fields of `where`.

    One of `documents` is an id, the folder that ids begin with (`docs` or `docs/`), or a glob (`docs/*.md`, in which *
    crosses folders). A field matches by its text, its JSON, or an item of its list; `title` is a field too, unless the
    metadata has one of that name.
    """

    documents: tuple[str, ...] = ()
    where: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.documents or self.where)

    def accepts(self, document: DocumentRow) -> bool:
        """Whether a document is chosen."""
        if self.documents and not any(is_named(document.id, name) for name in self.documents):
            return False
        fields = {"title": document.title, **document.metadata} if self.where else {}
        return all(_has_field(fields, name, value) for name, value in self.where)


def _has_field(metadata: Mapping[str, Any], name: str, value: str) -> bool:
    if name not in metadata:
        return False
    found = metadata[name]
    items = found if isinstance(found, list) else [found]
    return any(value in (item, json.dumps(item)) for item in items)
