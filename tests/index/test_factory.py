"""Index strings from callers: parsed and bounded before Faiss sees them."""

import subprocess
import sys

import numpy as np
import pytest
from random_stores import Corpus, fill, spec

from memlm.errors import InvalidInput
from memlm.index.factory import MAX_LISTS, Factory, check_factory
from memlm.index.ivf import create_index, resolve_index
from memlm.index.store.writer import StoreWriter

HOSTILE = [
    "", ",", "Flat,", ",Flat,RFlat", "IVF4,Flat,RFlat", "IVF4,Flat,Refine(Flat)", "IVF4,SQ8 ", "ivf4,SQ8", "IVF4,sq8",
    "IVF0,SQfp16", "IVF00004,SQ8", "IVF-1,SQ8", "IVF4", "IVF4,", "IVFx,Flat", "IVF4,Nonsense", "IVF4_HNSW0,SQ8",
    "IVF20000000,SQfp16", "IVF999999999,Flat", "IVF9999999999,Flat", f"IVF{'9' * 500},Flat", "IVF4_HNSW100000,SQ8",
    "IVF4,PQ1x24", "IVF4,PQ4x13", "IVF4,PQ0", "IVF4,PQ4x0", "IVF4,PQ4x4fs", "IVF4,PQ4x4fsr", "IVF4,PQ9999x8",
    "OPQ64_1000000,IVF4,PQ4", "OPQ0,IVF4,PQ4", "OPQ4_0,IVF4,PQ4", "PCA0,IVF4,SQ8", "PCA1000000,IVF4,SQ8",
    "PCA8_4,IVF4,SQ8", "PCAW8,IVF4,SQ8", "PCA8,PCA4,IVF4,SQ8", "PCA8,Flat", "HNSW32", "IDMap,Flat", "IVF4,IVF4,Flat",
    "IVF4(IVF1000000),Flat", "IVF4,LSH", "IVF4,AQ", "IVF4,RQ8x16_Nqint8", "Random,IVF4,SQ8", "IVF٤,SQ8", "IVF4٤,SQ8",
    "IVF4,SQ8\n", "IVF4,SQ8\0", "a" * 1000,
]  # fmt: skip
TOO_WIDE = [
    "OPQ7,IVF4,SQ8",
    "OPQ64,IVF4,SQ8",
    "OPQ4_6,IVF4,PQ2",
    "PCA17,IVF4,SQ8",
    "IVF4,PQ7",
    "IVF4,PQ64",
    "PCA8,IVF4,PQ16",
]
DIM = 16
FINE = {
    "IVF4,Flat": 4, "IVF1,SQ4": 1, "IVF4,SQ6": 4, "IVF64,SQ8": 64, "IVF4,SQfp16": 4, "IVF4,RaBitQ": 4, "IVF4,PQ8": 4,
    "IVF4,PQ4x4": 4, "IVF4,PQ4x12": 4, "IVF4_HNSW,SQ8": 4, "IVF4_HNSW8,SQfp16": 4, "OPQ4,IVF8,PQ4x4": 8,
    "OPQ4_8,IVF8,PQ4": 8, "PCA8,IVF8,SQfp16": 8, "PCAR8,IVF8,PQ8": 8,
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_a_string_outside_of_the_grammar_or_its_bounds_is_refused(text: str) -> None:
    for refuses in (check_factory, lambda text: resolve_index(text, 6, 8), lambda text: create_index(text, DIM)):
        with pytest.raises(InvalidInput, match="expected") as refused:
            refuses(text)
        assert refused.value.field == "index"
        assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("text", TOO_WIDE)
def test_a_string_that_does_not_fit_the_keys_is_refused(text: str) -> None:
    check_factory(text)
    with pytest.raises(InvalidInput, match="expected"):
        create_index(text, DIM)


@pytest.mark.parametrize("text", FINE)
def test_what_is_supported_is_made(text: str) -> None:
    assert resolve_index(text, 6, 8) == text
    assert create_index(text, DIM).d == DIM
    assert Factory.parse(text).lists == FINE[text]


def test_lists_are_bounded_by_the_entries() -> None:
    Factory.parse("IVF6,SQ8").check_lists(6)
    Factory.parse("IVF1,SQ8").check_lists(0)
    with pytest.raises(InvalidInput, match="about 6 entries; expected at most as many lists"):
        Factory.parse("IVF7,SQ8").check_lists(6)


def test_no_refusal_takes_memory() -> None:
    """Faiss would allocate gigabytes for some of them before it fails."""
    script = f"""
import resource
from memlm.errors import InvalidInput
from memlm.index.ivf import create_index
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
for text in {[*HOSTILE, *TOO_WIDE, f"IVF{MAX_LISTS + 1},Flat"]!r}:
    try:
        create_index(text, {DIM})
    except InvalidInput:
        continue
    raise SystemExit(text)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_an_added_segment_has_no_more_lists_than_entries(tmp_path) -> None:
    corpus = Corpus(3, num_documents=6)
    first = len(corpus.keys_ND) // 2
    with StoreWriter.create(tmp_path / "s", spec(index=f"IVF{first // 2},SQfp16")) as writer:
        fill(writer, corpus)
        writer.commit().close()
    with StoreWriter.extend(tmp_path / "s", spec(index=f"IVF{first // 2},SQfp16")) as writer:
        writer.begin_document("small")
        writer.append(corpus.keys_ND[:3].astype(np.float16), corpus.values_N[:3])
        with writer.commit() as store:
            assert [segment.record.index for segment in store.snapshot.segments] == [
                f"IVF{first // 2},SQfp16",
                "IVF3,SQfp16",
            ]
            assert store.snapshot.verify() == []
