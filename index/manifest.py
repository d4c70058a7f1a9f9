"""The manifest: one small JSON file that says what a store is made of. CURRENT names the one that counts.

A commit writes manifest-N.json, which carries a checksum of itself, and then CURRENT, which carries the manifest's
name and checksum. Readers keep the manifest they opened; the files of older ones go when a later commit no longer
names them.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from memlm.index.durable import checksum_of, remove, write_whole
from memlm.index.errors import Corrupt, Incompatible, NotFound

FORMAT_VERSION = 1
CURRENT = "CURRENT"
SEGMENTS = "segments"
JOURNAL = "building.json"
RESTORE = "restore it from a copy, or build the store anew"


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """How a store's entries were made; the same for all its segments.

    `context` and `stride` count tokens; `index` is "auto" or a Faiss factory string. `target` is the share of the
    softmax mass that an index should find, `max_memory` the bytes that searching it may want in memory; without
    `keep_keys`, keys go once the index is built and judged. With `prune`, entries whose token the model alone gives
    that probability or more are left out of the index.
    """

    dim: int
    model_fingerprint: str
    tokenizer_fingerprint: str
    context: int
    stride: int
    index: str = "auto"
    seed: int = 0
    target: float = 0.95
    max_memory: int | None = None
    keep_keys: bool = True
    prune: float | None = None


@dataclass(frozen=True, slots=True)
class KnnDefaults:
    """How a store is asked where a request leaves it open: k, lam, softmax temperature, and what they were tuned on.

    `gain` is how many nats per token they saved there over the model alone, with its standard error. `adaptive` are
    the weights of a lam that differs from position to position, `skip_above` the model's log-probability above which
    it is not asked, `follow` how many pointers do in place of a search, `nprobe` how many lists are searched; None
    where these were not found to be of use, or not wanted.
    """

    k: int
    lam: float
    temperature: float
    tuned_on: str | None
    gain: float | None = None
    gain_error: float | None = None
    adaptive: Mapping[str, Any] | None = None
    skip_above: float | None = None
    follow: int | None = None
    nprobe: int | None = None


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file must be."""

    bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One immutable segment. `deleted` names the file of its deleted documents' rows, if any; `nprobe` and `rerank`
    say how its index is asked, and `tried` how that was found out.
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
        """Where it lies within the store."""
        return f"{SEGMENTS}/{self.number:06d}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a reader needs to know of a store."""

    number: int
    spec: StoreSpec
    segments: tuple[SegmentRecord, ...]
    defaults: KnnDefaults
    quality: Mapping[str, Any] | None = None
    created: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"manifest-{self.number:06d}.json"

    @property
    def last_segment(self) -> int:
        """The number of its newest segment; 0 where there is none."""
        return max((segment.number for segment in self.segments), default=0)

    def next(self, **changes: Any) -> Manifest:
        """The one that follows, with these changes."""
        return replace(self, number=self.number + 1, created=time.time(), **changes)

    def encode(self) -> bytes:
        """As JSON, with its own checksum."""
        body = {"format_version": FORMAT_VERSION, "metric": "l2", "key_dtype": "float16", **asdict(self)}
        return sign(body)


def read_manifest(path: Path) -> Manifest:
    """The manifest that counts in a store.

    Raises NotFound where there is no store, Corrupt for a damaged file, Incompatible for another version of the format.
    """
    current = path / CURRENT
    for _ in range(10):  # a commit may replace the manifest between reading its name and opening it
        if not _is_file(current):
            raise _no_store(path)
        said = current.read_bytes()
        name, _, expected = said.decode("ascii", errors="replace").strip().partition(" ")
        try:
            content = (path / name).read_bytes()
        except (OSError, ValueError):
            if current.is_file() and current.read_bytes() != said:
                continue
            raise Corrupt(f"{current} names {name!r}, which is not there; {RESTORE}") from None
        if checksum_of(content) != expected:
            raise Corrupt(f"{path / name} is not what {current} says it is (wrong checksum); {RESTORE}")
        return _decode(content, path / name)
    raise Corrupt(f"{current} does not come to rest; try again when nobody writes to the store")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # there can be none of that name
            return False
        raise


def commit_manifest(path: Path, manifest: Manifest) -> None:
    """Makes a manifest the one that counts; everything that it names must be on the disk already."""
    content = manifest.encode()
    write_whole(path / manifest.name, content)
    write_whole(path / CURRENT, f"{manifest.name} {checksum_of(content)}\n".encode())


def sweep(path: Path, manifest: Manifest) -> None:
    """Removes what no longer counts: older manifests, unfinished commits, tombstones that were replaced."""
    for file in (*path.glob("manifest-*.json*"), *path.glob(f"{CURRENT}.*.tmp")):
        if file.name != manifest.name:
            remove(file)
    named = {segment.number: segment for segment in manifest.segments}
    for folder in (path / SEGMENTS).iterdir():
        segment = named.get(int(folder.name)) if folder.name.isdigit() else None
        if segment is None:
            remove(folder)
            continue
        for file in folder.iterdir():
            if file.name not in segment.files:
                remove(file)


def sign(body: dict[str, Any]) -> bytes:
    """A small file of ours: JSON that carries a checksum of itself."""
    return _canonical({**body, "checksum": checksum_of(_canonical(body))})


def signed(content: bytes) -> dict[str, Any]:
    """What `sign` was given. Raises ValueError, saying what is wrong, for anything else."""
    try:
        body: dict[str, Any] = json.loads(content)
        said = body.pop("checksum")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"cannot be read ({error})") from error
    if said != checksum_of(_canonical(body)):
        raise ValueError("was changed (wrong checksum)")
    return body


def _decode(content: bytes, path: Path) -> Manifest:
    try:
        body = signed(content)
    except ValueError as error:
        raise Corrupt(f"{path} {error}; {RESTORE}") from error
    if (version := body.pop("format_version")) != FORMAT_VERSION:
        raise Incompatible(f"{path} is of format {version}; this version of memlm reads format {FORMAT_VERSION}")
    del body["metric"], body["key_dtype"]
    segments = tuple(
        SegmentRecord(
            **{
                **segment,
                "files": {name: FileRecord(**said) for name, said in segment["files"].items()},
                "tried": tuple(segment.get("tried", ())),
            }
        )
        for segment in body.pop("segments")
    )
    spec, defaults = StoreSpec(**body.pop("spec")), KnnDefaults(**body.pop("defaults"))
    return Manifest(spec=spec, segments=segments, defaults=defaults, **body)


def _no_store(path: Path) -> Exception:
    if _is_file(path / JOURNAL):
        return NotFound(
            f"{path} is an unfinished build; run `memlm index build` with the same corpus again to go on with it",
            kind="datastore",
            name=str(path),
        )
    return NotFound(f"no datastore at {path}; build one with `memlm index build`", kind="datastore", name=str(path))


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
