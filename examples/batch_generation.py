"""Continues many prompts side by side, and prints JSON Lines: python examples/batch_generation.py [MODEL]"""

import json
import sys

import memlm

PROMPTS = ["The capital of France is", "import numpy as", "Once upon a time", "To be or not"]

with memlm.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as lm:
    for prompt, completion in zip(PROMPTS, lm.generate_batch(PROMPTS, max_tokens=12, temperature=0), strict=True):
        print(json.dumps({"prompt": prompt, "text": completion.text, "tokens": len(completion.tokens)}))
