"""`python -m benchmarks NAME`: what the reports of memlm were made with. It runs in a checkout."""

from __future__ import annotations

from benchmarks.commands import app
from memlm.cli import run

run(app)
