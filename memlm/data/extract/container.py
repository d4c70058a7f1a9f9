"""Files that are ZIP archives of XML (Office, EPUB): their parts, within limits, and XML without entities."""

from __future__ import annotations

import io
import posixpath
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any
from urllib.parse import unquote
from xml.etree import ElementTree

from memlm.data.extract.outcome import Unreadable

Element = ElementTree.Element
MAX_PART_BYTES = 256 << 20  # unpacked
MAX_UNPACKED_BYTES = 1 << 30  # of all parts that are read
MAX_PACKING = 500  # times that a part may grow; XML of repeated cells grows a hundredfold
FREE_BYTES = 16 << 20  # a part this small may grow by any factor
PREFIX_BYTES = 1 << 16  # of a part, where a document type would stand


class Container:
    """An archive's parts. Raises Unreadable for one that is damaged, encrypted, or grows beyond the limits."""

    def __init__(self, data: bytes, what: str) -> None:
        self._what, self._read_bytes = what, 0
        try:
            self._archive = zipfile.ZipFile(io.BytesIO(data))
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
            hint = "it is encrypted, or in an old format; save it again" if data[:4] == b"\xd0\xcf\x11\xe0" else error
            raise Unreadable(f"is no {what} file ({hint})") from None
        self._names = set(self._archive.namelist())

    def __contains__(self, name: str) -> bool:
        """Whether there is such a part."""
        return name in self._names

    def read(self, name: str) -> bytes:
        """The bytes of a part."""
        with self.open(name) as part:
            return part.read()

    def open(self, name: str) -> io.BufferedReader:
        """A part, to be read in pieces."""
        try:
            info = self._archive.getinfo(name)
        except KeyError:
            raise Unreadable(f"is no {self._what} file (it lacks {name})") from None
        if info.flag_bits & 1:
            raise Unreadable("is encrypted with a password; save it without one")
        grown = info.file_size > max(FREE_BYTES, MAX_PACKING * info.compress_size)
        self._read_bytes += info.file_size
        if grown or info.file_size > MAX_PART_BYTES or self._read_bytes > MAX_UNPACKED_BYTES:
            raise Unreadable(f"unpacks to more than is read of one file ({name}: {info.file_size:,} bytes)")
        return io.BufferedReader(_Part(self._archive.open(info), name), PREFIX_BYTES)

    def xml(self, name: str) -> Element:
        """The tree of a part. Raises Unreadable for one with a document type, which may hold entities."""
        data = self.read(name)
        if b"<!DOCTYPE" in data[:PREFIX_BYTES].replace(b"\0", b"") or b"<!ENTITY" in data:
            raise Unreadable(f"declares a document type in {name}, which no {self._what} file does")
        try:
            return ElementTree.fromstring(data)
        except (ElementTree.ParseError, ValueError, LookupError) as error:
            raise Unreadable(f"is damaged ({name}: {error})") from None

    def elements(self, name: str, tag: str) -> Iterator[Element]:
        """The elements of a name in a part, as they come: a sheet need not be held whole."""
        with self.open(name) as part:
            if b"<!DOCTYPE" in part.peek(PREFIX_BYTES)[:PREFIX_BYTES].replace(b"\0", b""):
                raise Unreadable(f"declares a document type in {name}, which no {self._what} file does")
            try:
                path = list[Element]()
                for event, element in ElementTree.iterparse(part, ("start", "end")):
                    if event == "start":
                        path.append(element)
                        continue
                    path.pop()
                    if local(element) == tag:
                        yield element
                        element.clear()
                        if path:
                            path[-1].remove(element)
            except (ElementTree.ParseError, ValueError, LookupError) as error:
                raise Unreadable(f"is damaged ({name}: {error})") from None

    def relations(self, name: str) -> dict[str, tuple[str, str]]:
        """The parts that a part refers to: kind and name, by id."""
        folder, _, file = name.rpartition("/")
        rels = f"{folder}/_rels/{file}.rels".lstrip("/")
        if rels not in self:
            return {}
        return {
            each.get("Id", ""): (each.get("Type", "").rpartition("/")[2], joined(folder, each.get("Target", "")))
            for each in self.xml(rels)
            if each.get("TargetMode") != "External"
        }

    def property(self, name: str) -> str:
        """A property of an Office document, as `title`."""
        if "docProps/core.xml" not in self:
            return ""
        found = next((each for each in self.xml("docProps/core.xml") if local(each) == name), None)
        return sensible_title(found.text if found is not None else None)


class _Part(io.RawIOBase):
    """Reads a part, whose checksum and packing may be wrong."""

    def __init__(self, part: IO[bytes], name: str) -> None:
        self._part, self._name = part, name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._part.read(len(buffer))
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
            raise Unreadable(f"is damaged ({self._name}: {error})") from None
        buffer[: len(data)] = data
        return len(data)


def local(element: Element) -> str:
    """An element's name without its namespace: the strict and the usual form of Office differ in nothing else."""
    return element.tag.rpartition("}")[2]


def attribute(element: Element | None, name: str) -> str | None:
    """An attribute by its name without its namespace."""
    if element is None:
        return None
    return next((value for key, value in element.attrib.items() if key.rpartition("}")[2] == name), None)


def child(element: Element | None, *names: str) -> Element | None:
    """The first element on a path of names below an element."""
    for name in names:
        if element is None:
            return None
        element = next((each for each in element if local(each) == name), None)
    return element


def joined(folder: str, target: str) -> str:
    """The name of a part that a part in a folder refers to."""
    return posixpath.normpath(posixpath.join("/", folder, unquote(target))).lstrip("/")


def sensible_title(title: str | None) -> str:
    """A title from a document's properties, "" for one that a program made up."""
    words = " ".join((title or "").split())
    made_up = ("untitled", "microsoft ", "powerpoint ", "document", "presentation", "slide 1", "title", "(anonymous)")
    is_file = words.lower().endswith(
        (".doc", ".docx", ".ppt", ".pptx", ".xls", ".xlsx", ".pdf", ".indd", ".tex", ".dvi")
    )
    return (
        ""
        if words.lower().startswith(made_up[:3]) or words.lower().strip("0123456789 ") in made_up or is_file
        else words
    )
