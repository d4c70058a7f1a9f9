"""Chats about documents in memory: python examples/chat_with_notes.py [MODEL]"""

import sys
import tempfile
from pathlib import Path

import memlm

NOTES = [memlm.Document("quillon.md", "The Quillon 40 is a weather station for ships.\n")]

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
with tempfile.TemporaryDirectory() as folder:
    store = Path(folder) / "store"
    memlm.build_index(model, NOTES, store, keys="now")
    with memlm.load(model, stores=[store]) as lm:
        messages = [{"role": "user", "content": "What is the Quillon 40?"}]
        answer = lm.chat(messages, max_tokens=40, temperature=0).result()
        print(answer.text)
        messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": "Who would buy one?"},
        ]
        for token in lm.chat(messages, max_tokens=40, temperature=0):
            print(token.text, end="", flush=True)
        print()
