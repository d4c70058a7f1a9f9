"""Bytes of a text -> the text, by their own word on their encoding, or where there is but one that fits.

UTF-8 and byte order marks are exact. UTF-16 without a mark is known by its zeros, and Windows-1252, with Latin-1 in it,
by letters that stand as they do in words of Western Europe. Any other encoding is refused: a detector
(charset-normalizer 3.5) read a third of 23 short texts in other encodings as nonsense, without a word.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter

from memlm.base.texts import MARKS, text_of
from memlm.data.extract.outcome import Extracted, Unreadable

SAMPLE_BYTES = 1 << 16  # whose zeros are counted
LEAST_BYTES = 16  # that tell UTF-16
LEAST_ZEROS, FEW_PAGES = 0.05, 0.9  # of the high bytes: blanks and digits, and those of three pages of 256 characters
MOST_HIGH = 0.25  # of the letters, beyond ASCII: French and Danish have less than a tenth

# Without those of Icelandic, which Turkish and Czech texts in their own encodings would be read as.
WORD_LETTERS = "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜßàáâãäåæçèéêëìíîïñòóôõöøùúûüŒœŠšŽžŸ"
WITHIN = "’‘·\xad´"  # signs that stand within words: l’eau, col·legi
SIGNS = WITHIN + "€‚„…‰‹“”•–—™›\xa0¡£§©«®ª°±²³º»¼½¾¿×÷¢¥µ¶¹†‡"
UNLIKELY = re.compile(
    # other signs, a sign within a word, three such letters in a row, a capital within a small word, a low quotation
    # mark behind a letter, controls
    rf"[^\x00-\x7f{WORD_LETTERS}{SIGNS}]"
    rf"|(?<=[^\W\d_])[{SIGNS.removeprefix(WITHIN)}](?=[^\W\d_])"
    rf"|[{WORD_LETTERS}]{{3}}"
    r"|(?<=[a-zß-öø-ÿ])[À-ÖØ-ÞŒŠŸŽ](?=[a-zß-öø-ÿ])"
    r"|(?<=[^\W\d_])[‚„]"
    r"|õ(?!e)|Õ(?!E)"  # Hungarian's in its own encoding; Portuguese writes õe
    r"|[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f]"
)
CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
META = re.compile(rb"<meta[^>]{0,400}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
DECLARED = re.compile(rb"<\?xml[^>]{0,200}?encoding\s*=\s*[\"']([\w.:-]{1,40})")
# What pages mean by these names (https://encoding.spec.whatwg.org, "Names and labels").
MEANT = {
    "ascii": "cp1252", "us-ascii": "cp1252", "iso-8859-1": "cp1252", "latin1": "cp1252", "iso-8859-9": "cp1254",
    "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "sjis": "cp932", "x-sjis": "cp932", "euc-kr": "cp949",
    "ks_c_5601-1987": "cp949", "utf-16": "utf-8", "utf-16le": "utf-8", "utf-16be": "utf-8",
}  # fmt: skip


def decode(data: bytes, *, declared: str = "") -> str:
    """The text of some bytes, which may declare their encoding. Raises Unreadable for those that are no text, or whose
    encoding is not known.
    """
    try:
        if not has_mark(data) and b"\0" in data:
            return _utf_16(data)
        return text_of(data)
    except UnicodeDecodeError as error:
        if has_mark(data):
            raise Unreadable(f"its byte order mark says {error.encoding}, and it is not; convert the file") from None
        bad = error.start
    for name in filter(None, (MEANT.get(declared.lower(), declared), "cp1252")):
        text = _decoded(data, name)
        if text is not None and (_is_western(text) if name == "cp1252" else not CONTROLS.search(text)):
            return text
    raise Unreadable(
        f"not UTF-8 (byte 0x{data[bad]:02x}); convert the file to UTF-8 text (iconv -f ENCODING -t UTF-8), or leave it"
        " out with --glob",
        line=1 + data.count(b"\n", 0, bad),
    )


def read_text(data: bytes) -> Extracted:
    """A text as it is. Raises Unreadable."""
    return Extracted(decode(data))


def declared_in_html(head: bytes) -> str:
    """The encoding that the beginning of a page names, "" for none."""
    found = META.search(head) or DECLARED.search(head)
    return found[1].decode() if found else ""


def has_mark(data: bytes) -> bool:
    return any(data.startswith(mark) for mark in MARKS)


def utf_16_of(sample: bytes) -> str:
    """Which UTF-16 the first bytes of a text without a mark are in, "" for none: one byte of each pair is mostly zero,
    or one of few values, as letters of one alphabet are.
    """
    sample = sample[: min(len(sample), SAMPLE_BYTES) // 2 * 2]
    if len(sample) < LEAST_BYTES:
        return ""
    for encoding, high in (("utf-16-le", 1), ("utf-16-be", 0)):
        pages, pairs = Counter(sample[high::2]), len(sample) // 2
        few = sum(count for _, count in pages.most_common(3))
        if few >= FEW_PAGES * pairs and pages[0] >= LEAST_ZEROS * pairs and 0 not in sample[1 - high :: 2]:
            return encoding
    return ""


def _utf_16(data: bytes) -> str:
    """Reads UTF-16 without a mark. Raises Unreadable for other bytes with zeros."""
    text = _decoded(data, utf_16_of(data))
    if text is not None and not CONTROLS.search(text):
        return text
    line = 1 + data.count(b"\n", 0, data.find(b"\0"))
    raise Unreadable("a NUL byte, as in binary files; convert the file to text, or leave it out with --glob", line=line)


def _decoded(data: bytes, encoding: str) -> str | None:
    try:
        codec = codecs.lookup(encoding)
        return data.decode(codec.name) if getattr(codec, "_is_text_encoding", True) else None
    except (LookupError, UnicodeError, ValueError):
        return None


def _is_western(text: str) -> bool:
    """Whether a text that was read as Windows-1252 is surely in it: its letters stand as in words."""
    if "ø" in text and any(letter in text for letter in "áíìèù"):  # Czech in its own encoding, and no Danish
        return False
    high = sum(text.count(letter) for letter in WORD_LETTERS)
    letters = sum(map(str.isalpha, text)) if high else 0
    return high <= MOST_HIGH * letters and UNLIKELY.search(text) is None
