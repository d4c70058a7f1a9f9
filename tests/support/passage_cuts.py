"""Where passages begin, by the rules said plainly: over the lines of a whole document, a byte at a time."""

from __future__ import annotations

import re

from memlm.index.store.derived.text_blocks import UNDERLINES
from memlm.index.store.derived.text_cuts import _SENTENCES

TEXT, CODE = -1, -2


def cuts_by_lines(tokens: list[bytes], limit: int, *, markdown: bool) -> list[tuple[int, tuple[str, ...]]]:
    """The first byte of each passage, and its headings."""
    content = b"".join(tokens)
    blocks = blocks_by_lines(content, markdown=markdown)
    usual, little = limit * 4 // 5, limit // 5
    first_bytes = [sum(map(len, tokens[:row])) for row in range(len(tokens) + 1)]

    def row(place: int) -> int:
        return max(number for number, byte in enumerate(first_bytes) if byte <= place)

    def end_of(block: int) -> int:
        return blocks[block + 1][0] if block + 1 < len(blocks) else len(content)

    def begins(block: int) -> bool:
        return block == len(blocks) or blocks[block][1] >= 0 or blocks[block][3]

    cuts, begin, block, path = [], 0, 0, list[tuple[int, str]]()
    while True:
        taken = list[int]()  # blocks of text, whole or the rest of one
        end = None
        while block < len(blocks) and end is None:
            start, level, title, _ = blocks[block]
            if start >= begin and taken and begins(block):
                end = start
                break
            if level >= 0 and start >= begin:
                path = [*(each for each in path if each[0] < level), (level, title)]
            size, alone = row(end_of(block)) - row(begin), not taken or row(start) - row(begin) < little
            ends = begins(block + 1) and row(end_of(block)) - row(start) < little
            if size <= usual or (size <= limit and (alone or ends)):
                taken += [block] * (level < 0 or start < begin)
                block += 1
            elif alone:
                end = inside(content, begin, start, level, size, usual, row, first_bytes)
            else:
                end = start
        cuts.append((begin, tuple(title for _, title in path)))
        if end is None:
            return cuts
        begin = end


def inside(content, begin, start, level, size, usual, row, first_bytes) -> int:
    """Where a passage ends that cannot hold a block."""
    wanted = first_bytes[row(begin) + (usual if size > 2 * usual else -(-size // 2))]
    last = first_bytes[row(begin) + usual]
    first = max((begin + wanted) // 2, start)
    line = content[max(begin, start) :]
    is_code = level == CODE or line.startswith((b"    ", b"\t")) or line.lstrip(b" \t").startswith(b"|")
    sentences = {match.end() for match in _SENTENCES.finditer(content, first, last + 8)}
    lines = {place for place in range(first + 1, last + 1) if ends_run(content, place, b"\n\f")}
    words = {place for place in range(first + 1, last + 1) if ends_run(content, place, b" \t\n\r\f\v")}
    for ends in (lines, words) if is_code else (sentences, lines, words):
        if within := sorted(place for place in ends if first < place <= last):
            return min(within, key=lambda place: abs(place - wanted))
    if start > begin:
        return start
    characters = [place for place in range(begin + 1, last + 1) if content[place : place + 1] not in CONTINUING]
    following = (place for place in range(begin + 1, len(content) + 1) if content[place : place + 1] not in CONTINUING)
    return characters[-1] if characters else next(following)


CONTINUING = {bytes([byte]) for byte in range(0x80, 0xC0)}


def ends_run(content: bytes, place: int, signs: bytes) -> bool:
    return content[place - 1] in signs and content[place : place + 1] not in {bytes([sign]) for sign in signs}


def blocks_by_lines(content: bytes, *, markdown: bool) -> list[tuple[int, int, str, bool]]:
    """The first byte, the level and the title of each block, and whether a page begins there."""
    blocks, lines, begin = list[tuple[int, int, str, bool]](), re.findall(rb"[^\n\f]*[\n\f]|[^\n\f]+", content), 0
    fence, is_new, page = b"", True, False
    for number, line in enumerate(lines):
        text, words = line.rstrip(b"\n\f"), line.strip()
        heading = re.fullmatch(rb" {0,3}(#{1,6})[ \t]+([^ \t].{0,199})", text)
        title = heading[2].rstrip().rstrip(b"#").strip() if heading and markdown else b""
        mark = re.match(rb"`{3,}|~{3,}", words) if markdown else None
        if fence:
            if mark and words == mark[0] and words.startswith(fence):
                fence, is_new = b"", True
        elif mark:
            blocks.append((begin, CODE, "", page))
            fence = mark[0]
        elif title:
            blocks.append((begin, len(UNDERLINES) + len(heading[1]), title.decode(), page))
            is_new = True
        elif (above := title_above(lines, number)) is not None:
            start = begin - sum(map(len, lines[above:number]))
            blocks = [block for block in blocks if block[0] < start]
            blocks.append((start, UNDERLINES.index(words[:1]), lines[number - 1].strip().decode(), False))
            is_new = True
        elif words and (is_new or re.match(rb"[ \t]*([-*+]|\d{1,3}[.)])[ \t]", text)):
            blocks.append((begin, TEXT, "", page and not text.decode()[:1].islower()))
            is_new = False
        if not fence and (not words or line.endswith(b"\f")):
            is_new = True
        page = line.endswith(b"\f") or (page and not words)
        begin += len(line)
    return blocks


def title_above(lines: list[bytes], number: int) -> int | None:
    """The first line of a heading that the line with a number underlines."""
    under = lines[number].rstrip()
    if number == 0 or not re.fullmatch(rb"([#*=~^\"'+-])\1\1+", under):
        return None
    line, first = lines[number - 1].rstrip(), number - 1
    title = line.lstrip(b" ").decode()
    if (
        not title.strip(under.decode())
        or title[0].isspace()
        or line.startswith(b"    ")
        or abs(len(title) - len(under)) > 2
        or len(title) > 200
    ):
        return None
    if first and lines[first - 1].rstrip() == under:
        first -= 1
    is_alone = first == 0 or not lines[first - 1].strip() or lines[first - 1].endswith(b"\f")
    return first if is_alone else None
