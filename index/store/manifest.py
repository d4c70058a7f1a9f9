"""The manifest: one small JSON file that lists the parts of a store. `CURRENT` names the newest one.

A commit writes manifest-N.json, which carries a checksum of itself, and then `CURRENT`, which carries the manifest's
name and checksum and the store's id. These identify a snapshot. The number does not: every new store begins at 1, and a
folder may be replaced by another store, or by an earlier state of the store. Readers keep the manifest they opened. A
later commit removes the files that no manifest names.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from secrets import token_hex
from shlex import quote
from typing import Any, TypeVar

from memlm.base.files import checksum_of, read_signed, remove, sign, write_atomic
from memlm.errors import Corrupt, Incompatible, Locked, MemlmError, NotFound
from memlm.index.factory import NO_INDEX
from memlm.index.store.lock import StoreLock

FORMAT_VERSION = 3  # 1 had no id of the store; up to 2 all of a store had keys, or nothing
READABLE_VERSIONS = (1, 2, 3)
ROW_BITS = 40  # of an entry's id, below the number of its segment
MAX_SEGMENTS = 1 << (63 - ROW_BITS)  # above which ids leave the range of int64
METRIC, KEY_DTYPE = "l2", "float16"
MANIFEST = re.compile(r"manifest-\d+\.json")
FIRST_MANIFEST = "manifest-000001.json"
CURRENT = "CURRENT"
SEGMENTS = "segments"
JOURNAL = "building.json"
# Beside a segment's files, from its tokens: no manifest names them.
WORDS, PASSAGES, VECTORS, SUFFIXES = "words.sqlite", "passages.bin", "vectors.bin", "suffixes.bin"
CUTS, CHUNKS = "cuts.sqlite", "chunks.sqlite"
DERIVED = (WORDS, CUTS, PASSAGES, VECTORS, SUFFIXES, CHUNKS)
# Of settings that were removed. Earlier versions wrote them into every store, and they change nothing now.
EARLIER_DEFAULTS = ("skip_retrieval_above", "min_pointers")
OWN_DOCUMENTS = "its own documents"  # the text that a store was tuned on by itself
RESTORE = "restore it from a copy, or build the store anew"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """How a store's entries were made, in all its segments.

    `context` and `stride` count tokens. The model reads `start_id` before each document, and before a prompt that is
    continued with the store; None stands for the tokenizer's own.

    All but the tokenizer and `start_id` is about keys, which each segment has or lacks. `index` is "auto" or a Faiss
    factory string; earlier versions wrote "none", with a `dim` of 0, for a store that was to stay without keys.
    `target` is the share of the softmax mass that an index should find, `max_ram_bytes` the bytes that searching it may
    want in RAM. Without `keep_keys`, the keys are deleted once the index is built and measured. With `prune`, entries
    whose token the model alone gives that probability or more are left out of the index.
    """

    dim: int
    model_fingerprint: str
    tokenizer_fingerprint: str
    context: int
    stride: int
    index: str = "auto"
    seed: int = 0
    target: float = 0.95
    max_ram_bytes: int | None = None
    keep_keys: bool = True
    prune: float | None = None
    start_id: int | None = None
    model: str | None = None  # a name to show, which need not be the same


@dataclass(frozen=True, slots=True)
class KnnDefaults:
    """The defaults of a store for requests that leave a setting open: k, lam, softmax temperature, and the text that
    they were tuned on.

    `gain` is how many nats per token they saved there over the model alone, with its standard error. `adaptive` are the
    weights of a lam that differs from position to position, and `nprobe` is the number of lists to search. Each is None
    if tuning did not try it or found it useless.

    `tuned_entries` are the entries that the store had then. Earlier versions did not count them.
    """

    k: int
    lam: float
    temperature: float
    tuned_on: str | None
    gain: float | None = None
    gain_error: float | None = None
    adaptive: Mapping[str, Any] | None = None
    nprobe: int | None = None
    tuned_entries: int | None = None

    @property
    def tuned_itself(self) -> bool:
        """Whether the store was tuned on its own documents, and not by hand."""
        return self.tuned_on is not None and self.tuned_on.startswith(OWN_DOCUMENTS)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The expected size and checksum of a file."""

    bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One immutable segment. `deleted` names the file with the rows of its deleted documents, if any. `nprobe` and
    `rerank` are the settings of its index, and `tried` are the trials that found them. `index` is "none" where the
    entries have no keys.
    """

    number: int
    entries: int
    documents: int
    index: str
    nprobe: int
    files: Mapping[str, FileRecord]
    deleted: str | None = None
    rerank: int = 0
    tried: tuple[Mapping[str, Any], ...] = ()

    @property
    def folder(self) -> str:
        """The segment's folder within the store."""
        return f"{SEGMENTS}/{self.number:06d}"

    @property
    def is_keyed(self) -> bool:
        """Whether its entries have keys, so that neighbors are found in it."""
        return self.index != NO_INDEX


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest.

    `store_id` is drawn at random when the store is built, and stays. It is empty in a store of format 1 until the next
    commit. `checksum` is that of the file. It identifies the snapshot together with the id, because numbers repeat in
    other stores. `emptied` is the highest number of a segment that went with no later one in its place, because ids of
    entries must not repeat.
    """

    number: int
    spec: StoreSpec
    segments: tuple[SegmentRecord, ...]
    defaults: KnnDefaults
    quality: Mapping[str, Any] | None = None
    created: float = field(default_factory=time.time)
    store_id: str = field(default_factory=lambda: token_hex(16))
    checksum: str = ""
    emptied: int = 0

    @property
    def name(self) -> str:
        """The manifest's file name."""
        return f"manifest-{self.number:06d}.json"

    @property
    def pointer(self) -> Pointer:
        """The content of `CURRENT` while this manifest is the newest."""
        return Pointer(self.name, self.checksum, self.store_id)

    @property
    def is_keyed(self) -> bool:
        """Whether a segment has keys, or those that had some are gone. Others serve each model of their tokenizer."""
        return any(segment.is_keyed for segment in self.segments) or (not self.segments and self.defaults.k > 0)

    @property
    def last_segment(self) -> int:
        """The highest number of a segment, also of those that went. 0 if there was none."""
        return max(self.emptied, *(segment.number for segment in self.segments), 0)

    def next(self, **changes: Any) -> Manifest:
        """The next manifest, with some fields changed."""
        store_id = self.store_id or token_hex(16)
        return replace(self, number=self.number + 1, created=time.time(), store_id=store_id, checksum="", **changes)

    def encode(self) -> bytes:
        """JSON with a checksum of itself."""
        body = {"format_version": FORMAT_VERSION, "metric": METRIC, "key_dtype": KEY_DTYPE, **asdict(self)}
        del body["checksum"]  # of the whole file, which `CURRENT` has
        return sign(body)


@dataclass(frozen=True, slots=True)
class Pointer:
    """The content of `CURRENT`: the manifest's file name and checksum, and the store's id, which format 1 lacks.

    Two pointers are equal only for one snapshot of one store.
    """

    manifest: str
    checksum: str
    store_id: str = ""

    def encode(self) -> bytes:
        """Formats the pointer as one line."""
        return f"{self.manifest} {self.checksum} {self.store_id}".strip().encode() + b"\n"


def read_pointer(path: Path) -> Pointer:
    """Reads `CURRENT`. Raises NotFound if there is no store, and Corrupt if `CURRENT` is damaged or missing from a
    store.
    """
    current = path / CURRENT
    try:
        content = current.read_bytes()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise
        problem = _no_store(path)
        if error.errno == errno.ENOENT and current.is_file():  # the first commit was made while this looked for it
            return read_pointer(path)
        raise problem from None
    words = content.decode("ascii", errors="replace").split()
    if len(words) not in (2, 3) or not MANIFEST.fullmatch(words[0]):
        raise Corrupt(f"{current} was changed; {_way_back(path)}")
    return Pointer(*words)


def read_manifest(path: Path) -> Manifest:
    """Reads a store's newest manifest.

    Raises NotFound if there is no store, Corrupt for a damaged or missing file, and Incompatible for a store that a
    newer version has written.
    """
    for _ in range(10):  # a commit may replace the manifest between reading its name and opening it
        pointer = read_pointer(path)
        file = path / pointer.manifest
        try:
            content = file.read_bytes()
        except OSError:
            if read_pointer(path) != pointer:
                continue
            raise Corrupt(
                f"{path / CURRENT} names {pointer.manifest!r}, which cannot be read; {_way_back(path)}"
            ) from None
        if checksum_of(content) != pointer.checksum:
            if read_pointer(path) != pointer:  # another store's manifest of the same name has taken its place
                continue
            raise Corrupt(f"{file} is not what {path / CURRENT} says it is (wrong checksum); {_way_back(path)}")
        manifest = _decode(content, file)
        if manifest.store_id != pointer.store_id:
            raise Corrupt(f"{path / CURRENT} is of another store than {file}; {RESTORE}")
        return manifest
    raise Corrupt(f"{path / CURRENT} does not come to rest; try again when nobody writes to the store")


def commit_manifest(path: Path, manifest: Manifest, *, after: Manifest | None, lock: StoreLock) -> Manifest:
    """Makes a manifest the newest, and returns it with its checksum. All files that it names must be synced.

    Raises Locked, without a change, if the store at the path is no longer the one that `lock` has locked, or no longer
    at the snapshot of `after`. None stands for a store that does not exist yet.
    """
    content = manifest.encode()
    manifest = replace(manifest, checksum=checksum_of(content))
    check_unchanged(path, after, lock)
    write_atomic(path / manifest.name, content)
    check_unchanged(path, after, lock)
    write_atomic(path / CURRENT, manifest.pointer.encode())
    return manifest


def check_unchanged(path: Path, manifest: Manifest | None, lock: StoreLock) -> None:
    """Raises Locked unless the store has the snapshot of `manifest`, in the folder that `lock` has locked."""
    lock.check()
    try:
        found: Pointer | None = read_pointer(path)
    except NotFound:
        found = None
    if found != (None if manifest is None else manifest.pointer):
        raise Locked(
            f"{path} was replaced by another store, or by an earlier state of it, while it was being changed; what is"
            " there now was left as it is: run the same command again"
        )


def sweep(path: Path, manifest: Manifest) -> None:
    """Removes the files that the manifest does not name, and those of killed commits. Needs the commit lock.

    The files that are derived from a segment that the manifest names are kept.
    """
    for file in (*path.glob("manifest-*.json*"), *path.glob(f"{CURRENT}.*tmp")):
        if file.name != manifest.name:
            remove(file)
    named = {segment.number: segment for segment in manifest.segments}
    for folder in (path / SEGMENTS).iterdir():
        segment = named.get(int(folder.name)) if folder.name.isdigit() else None
        if segment is None:
            remove(folder)
            continue
        for file in folder.iterdir():
            if file.name not in segment.files and file.name not in DERIVED:
                remove(file)


def lost_store(path: Path) -> str | None:
    """Describes the parts of a store in a folder without a usable `CURRENT`, or returns None if there are none.

    A build that was killed at its first commit does not count, because the build resumes from its journal.
    """
    manifests, segments = manifests_in(path), _segment_folders(path)
    if not (manifests or segments) or (is_unfinished_build(path) and manifests in ([], [path / FIRST_MANIFEST])):
        return None
    return " and ".join(
        [*([manifests[-1].name] if manifests else []), *([f"{len(segments)} segments"] if segments else [])]
    )


def is_unfinished_build(path: Path) -> bool:
    """Whether a folder's journal is that of a build, or cannot be read."""
    try:
        return bool(read_signed((path / JOURNAL).read_bytes())["task"] == "build")
    except OSError:
        return False
    except (ValueError, KeyError):
        return not manifests_in(path)


def newest_manifest(path: Path) -> Manifest:
    """Reads the manifest of the highest number in a folder, also if `CURRENT` does not name it.

    Raises NotFound if there is none, and Corrupt if it is damaged.
    """
    manifests = manifests_in(path)
    if not manifests:
        raise NotFound(f"no manifest in {path}; {RESTORE}", kind="datastore", name=str(path))
    return _decode(manifests[-1].read_bytes(), manifests[-1])


def manifests_in(path: Path) -> list[Path]:
    """Returns the manifests in a folder, oldest first."""
    try:
        found = [file for file in path.iterdir() if MANIFEST.fullmatch(file.name)]
    except OSError:
        return []
    return sorted(found, key=lambda file: int(file.stem.removeprefix("manifest-")))


def _segment_folders(path: Path) -> list[Path]:
    try:
        return [folder for folder in (path / SEGMENTS).iterdir() if folder.name.isdigit()]
    except OSError:
        return []


def _decode(content: bytes, path: Path) -> Manifest:
    """Parses a manifest. Raises Corrupt for changed bytes, and Incompatible for another version's format."""
    try:
        body = read_signed(content)
    except ValueError as error:
        raise Corrupt(f"{path} {error}; {RESTORE}") from error
    version = body.pop("format_version", None)
    if version not in READABLE_VERSIONS:
        raise Incompatible(
            f"{path} is of format {version}; this version of memlm reads formats 1 to {FORMAT_VERSION}: install the"
            " version of memlm that wrote it, or a newer one"
        )
    try:
        if (kinds := (body.pop("metric"), body.pop("key_dtype"))) != (METRIC, KEY_DTYPE):
            raise TypeError(f"has keys of another kind ({', '.join(map(str, kinds))})")
        segments = tuple(
            _known(
                SegmentRecord,
                {
                    **segment,
                    "files": {name: _known(FileRecord, record) for name, record in segment["files"].items()},
                    "tried": tuple(segment.get("tried", ())),
                },
            )
            for segment in body.pop("segments")
        )
        kept = {name: value for name, value in body.pop("defaults").items() if name not in EARLIER_DEFAULTS}
        spec, defaults = _known(StoreSpec, body.pop("spec")), _known(KnnDefaults, kept)
        if version == 1:
            body["store_id"] = ""
        parsed = {"spec": spec, "segments": segments, "defaults": defaults, "checksum": checksum_of(content)}
        return _known(Manifest, {**body, **parsed})
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        problem = f"lacks {error}" if isinstance(error, KeyError) else error
        raise Incompatible(
            f"{path} {problem}: another version of memlm has written it; install that version, or a newer one"
        ) from error


def _known(kind: type[T], values: Mapping[str, Any]) -> T:
    """Creates a dataclass from its fields. Raises TypeError with the names of unknown and missing fields."""
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    if strange := sorted(set(values) - set(known)):
        raise TypeError(f"has fields that this version does not know ({', '.join(strange)})")
    needed = {each.name for each in known.values() if each.default is MISSING and each.default_factory is MISSING}
    if lacking := sorted(needed - set(values)):
        raise TypeError(f"lacks {', '.join(lacking)}")
    return kind(**values)


def _no_store(path: Path) -> Exception:
    if lost := lost_store(path):
        return Corrupt(f"{path / CURRENT} is missing, but {lost} are there; {_way_back(path)}")
    if os.path.isfile(path / JOURNAL):  # Path's own raises for a name that is too long
        return NotFound(
            f"{path} is an unfinished build; run `memlm index build` with the same corpus again to go on with it",
            kind="datastore",
            name=str(path),
        )
    return NotFound(f"no datastore at {path}; build one with `memlm index build`", kind="datastore", name=str(path))


def _way_back(path: Path) -> str:
    """Describes how to recover a store that has a missing or wrong `CURRENT`."""
    for file in reversed(manifests_in(path)):
        with suppress(MemlmError, OSError):
            manifest = _decode(file.read_bytes(), file)
            return (
                f"its newest sound manifest is {manifest.name}: copy {CURRENT} from where the folder came from, or run"
                f" `memlm index verify {quote(str(path))} --repair`, which makes that manifest count"
            )
    return RESTORE
