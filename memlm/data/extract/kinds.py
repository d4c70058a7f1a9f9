"""Names of files -> the reader of each, or why it is left out."""

from __future__ import annotations

import re
from os.path import splitext

HEADING = re.compile(r"#{1,6}[ \t]+(.*?\S)(?:[ \t]+#+)?[ \t]*")
HEADING_WITHIN = 10_000  # characters
MAIL, MAILBOX = "mail", "mbox"
KINDS = {
    ".html": "html", ".htm": "html", ".xhtml": "html", ".shtml": "html",
    ".pdf": "pdf",
    ".docx": "docx", ".docm": "docx", ".dotx": "docx",
    ".pptx": "pptx", ".pptm": "pptx", ".ppsx": "pptx", ".potx": "pptx",
    ".xlsx": "xlsx", ".xlsm": "xlsx", ".xltx": "xlsx",
    ".epub": "epub",
    ".ipynb": "notebook",
    ".eml": MAIL, ".mbox": MAILBOX,
}  # fmt: skip
MARKDOWN = frozenset({".md", ".markdown", ".mkd"})
ARCHIVES = frozenset({
    ".zip", ".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".7z", ".rar", ".bz2", ".xz", ".lzma", ".lz4", ".br",
    ".jar", ".war", ".whl", ".egg", ".deb", ".rpm", ".apk", ".dmg", ".iso", ".cab", ".gz", ".zst",
})  # fmt: skip
# Without a reader here. Some are names of texts too, so that their bytes decide.
OTHER_DOCUMENTS = frozenset({
    ".doc", ".dot", ".xls", ".xlsb", ".ppt", ".pps", ".rtf", ".odt", ".ods", ".odp", ".pages", ".numbers", ".key",
    ".wpd", ".msg", ".chm", ".mobi", ".azw", ".azw3", ".djvu", ".ps", ".eps",
})  # fmt: skip
WEB_ARCHIVES = frozenset({".mht", ".mhtml", ".webarchive", ".maff"})
PACKED_ARCHIVE = "a packed archive; unpack it, and name the folder"
NO_READER = "a format without a reader here; save it as PDF, DOCX, HTML or text"

MARKUP = re.compile(  # the comments in one step, or many of them could end in more ways than can be tried
    rb"\s*(?:<\?xml[^>]{0,200}>\s*)?(?>(?:<!--.{0,2000}?-->\s*)*)<(?:!doctype\s+html|html)[\s>]",
    re.IGNORECASE | re.DOTALL,
)
PDF_SIGNATURE = b"%PDF-"
OTHER_SIGNATURES = (b"{\\rtf", b"%!PS", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")
ARCHIVE_SIGNATURES = (b"PK\x03\x04", b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07", b"\x1f\x8b\x08", b"\xfd7zXZ\0", b"BZh9")


def kind_of(name: str) -> str:
    """The kind of a file by its name without its packing, "" for one that is read as it is."""
    return KINDS.get(_suffix(name), "")


def kind_within(head: bytes) -> str:
    """The kind of a file by its first bytes, where its name says none: "" for one that is text, or not known."""
    if MARKUP.match(head.removeprefix(b"\xef\xbb\xbf")):
        return "html"
    return "pdf" if head.startswith(PDF_SIGNATURE) else ""


def refusal_of(name: str, head: bytes) -> str:
    """Why a file of that name that begins so is left out, "" where nothing is known against it."""
    suffix, is_archive = _suffix(name), head.startswith(ARCHIVE_SIGNATURES)
    is_other = suffix in OTHER_DOCUMENTS and (is_archive or b"\0" in head)
    if suffix in WEB_ARCHIVES or head.startswith(OTHER_SIGNATURES) or is_other:
        return NO_READER
    return PACKED_ARCHIVE if is_archive or (suffix in ARCHIVES and b"\0" in head) else ""


def title_of_markdown(text: str) -> str:
    """The first heading of a text in Markdown, "" for none near its beginning."""
    is_code = False
    for line in text[:HEADING_WITHIN].splitlines():
        is_code ^= line.lstrip().startswith(("```", "~~~"))
        if not is_code and (found := HEADING.fullmatch(line)):
            return found[1]
    return ""


def _suffix(name: str) -> str:
    return splitext(name.lower())[1]
