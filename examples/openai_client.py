"""The `openai` package on a memlm server that `memlm serve ... --http-port 8080` started.

python examples/openai_client.py [URL]
"""

import os
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080/v1"
client = OpenAI(base_url=url, api_key=os.environ.get("MEMLM_TOKEN", "none"))
model = client.models.list().data[0].id
stream = client.completions.create(
    model=model, prompt="The gateway listens on", max_tokens=16, temperature=0, stream=True,
    extra_body={"memory": {"neighbors": 1}},
)  # fmt: skip
for event in stream:
    for choice in event.choices:
        print(choice.text, end="", flush=True)
print()
