"""Shows which document gave each token of an answer: python examples/attribute.py [MODEL]"""

import sys
import tempfile
from pathlib import Path

import memlm

NOTES = [
    memlm.Document("gateway.md", "The gateway listens on port 7443. It forwards requests to the registry.\n"),
    memlm.Document("registry.md", "The registry keeps the address of every service for ninety seconds.\n"),
]

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
with tempfile.TemporaryDirectory() as folder:
    store = Path(folder) / "store"
    memlm.build_index(model, NOTES, store, keys="now")
    with memlm.load(model, stores=[store]) as lm:
        for token in lm.generate("The gateway listens on", max_tokens=8, temperature=0, lam=0.8, neighbors=8):
            agreeing = [place for place in token.neighbors if place.token_id == token.id]
            source = max(agreeing, key=lambda place: place.weight, default=None)
            where = f"{source.document_id}:{source.line}" if source else "the model"
            print(f"{token.text!r:>14}  {token.knn_share:4.0%} from memory  {where}")
