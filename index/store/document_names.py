"""How callers name documents: by an id, a folder, or a glob."""

from __future__ import annotations

from fnmatch import fnmatchcase


def is_named(document_id: str, name: str) -> bool:
    """Whether a name is the id, a folder that the id begins with, or a glob that it matches."""
    return document_id == name or document_id.startswith(folder_of(name)) or fnmatchcase(document_id, name)


def folder_of(name: str) -> str:
    """The beginning of the ids in the folder of a name."""
    return name.rstrip("/") + "/"


def is_glob(name: str) -> bool:
    """Whether a name has a character that stands for others in a glob."""
    return any(character in name for character in "*?[")
