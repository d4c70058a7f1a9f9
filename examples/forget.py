"""Adds a fact and deletes it, and shows its probability each time: python examples/forget.py [MODEL]"""

import math
import sys
import tempfile
from pathlib import Path

import memlm

CONTEXT, FACT = "The Quillon 40 is a", " weather station"
BEFORE = memlm.Document("gateway.md", "The gateway listens on port 7443. It forwards requests to the registry.\n")
NEW = memlm.Document("quillon.md", f"{CONTEXT}{FACT} for ships. It measures wind and pressure.\n")

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
with tempfile.TemporaryDirectory() as folder:
    store = Path(folder) / "store"
    memlm.build_index(model, [BEFORE], store, keys="now")
    with memlm.load(model, stores=[store]) as lm:

        def probability() -> float:
            lm.refresh()
            return math.exp(lm.loglikelihood(CONTEXT, FACT, lam=0.8)[0])

        print(f"before it is added:  {probability():.2g}")
        memlm.add_to_index(lm.checkpoint, [NEW], store, keys="now")
        print(f"in the datastore:    {probability():.2g}")
        lm.delete_documents([NEW.id])
        print(f"after its deletion:  {probability():.2g}")
