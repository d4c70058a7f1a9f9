"""Bits per byte of held-out files, alone and with a datastore of other files.

python examples/score_corpus.py MODEL CORPUS HELD_OUT
"""

import sys
import tempfile
from pathlib import Path

import memlm

model, corpus, held_out = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    store = Path(folder) / "store"
    memlm.build_index(model, [corpus], store, keys="now")
    with memlm.load(model, stores=[store]) as lm:
        for path in sorted(Path(held_out).rglob("*")):
            if path.is_file():
                score = lm.score(path.read_text(encoding="utf-8"))
                print(f"{score.base.bits_per_byte:.4f} alone  {score.bits_per_byte:.4f} with it  {path}")
