"""Lists the datastores of a server, and streams a continuation with the source of each token.

python client.py localhost:50051 "def main("
"""

import os
import sys

import memlm

target, prompt = (*sys.argv[1:], *["localhost:50051", "def main("][len(sys.argv) - 1 :])
with memlm.Client(target, token=os.environ.get("MEMLM_TOKEN")) as client:
    for store in client.datastores.list():
        print(f"{store.name}: {store.num_entries} entries")
    stream = client.generate(prompt, max_tokens=16, temperature=0, neighbors=1)
    for token in stream:
        source = next((f"{place.document_id}:{place.line}" for place in token.neighbors), "the model")
        print(repr(token.text), source)
    print(f"{stream.finished.usage.generated_tokens} tokens, {stream.finished.reason}")
