"""The code blocks of a page of documentation, run in order in one folder as a reader would.

Blocks of `sh` run in bash, and stop at the first command that fails. A line that begins with `memlm serve` is a server,
which runs until the page ends or the next one starts. Blocks of `python` run by themselves. The ports 50051 and 8080
become free ones. Other languages are output or configuration, and are not run. A comment before a block says more:

- `<!-- not run: REASON -->`
- `<!-- prints: A | B -->`: the block prints these texts
- `<!-- file: NAME -->`: the block, of any language, is the content of this file
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = re.compile(r"(?:<!-- (not run|prints|file): ([^>]*?) -->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PORTS = ("50051", "50052", "8080")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Block:
    """A fenced block, and the comment before it."""

    note: str
    value: str
    language: str
    code: str

    @property
    def is_run(self) -> bool:
        return self.language in ("sh", "python") and self.note not in ("not run", "file")


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text(encoding="utf-8"))]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@dataclass
class Reader:
    """Runs blocks in `folder`, with the commands of `path`. Leaving the block ends the server."""

    folder: Path
    path: str  # as in the environment
    ports: dict[str, str] = field(default_factory=lambda: {port: free_port() for port in PORTS})
    server: subprocess.Popen[str] | None = None
    drain: threading.Thread | None = None  # reads what the server prints

    def run(self, block: Block) -> str:
        """What the block prints. Raises AssertionError where a command of it fails."""
        code = self._with_free_ports(block.code)
        if block.note == "file":
            (self.folder / block.value).write_text(code, encoding="utf-8")
        if not block.is_run:
            return ""
        if block.language == "python":
            return self._call(["python", "-c", code])
        return "".join(map(self._run_part, self._parts(code)))

    def __enter__(self) -> Reader:
        (self.folder / ".curlrc").write_text("fail-with-body\nsilent\n")  # an answer with an error ends the block
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _with_free_ports(self, code: str) -> str:
        for port, free in self.ports.items():
            code = code.replace(port, free)
        return code

    def _parts(self, code: str) -> Iterator[str]:
        """The lines of a block, those of one server by themselves."""
        return (part for part in re.split(r"(^memlm serve (?:.*\\\n)*.*$)", code, flags=re.MULTILINE) if part.strip())

    def _run_part(self, part: str) -> str:
        if part.startswith("memlm serve ") and "--print-config" not in part:
            return self._serve(part)
        return self._call(["bash", "-e", "-o", "pipefail", "-c", part])

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": self.path, "COLUMNS": "100", "CURL_HOME": str(self.folder)}

    def _call(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def _serve(self, command: str) -> str:
        self._stop()
        self.server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self.server.stdout is not None
        port = next((port for port in self.ports.values() if port in command), "")
        last = self.ports["8080"] if "--http-port" in command else port  # the HTTP port is announced last
        lines = []
        for line in self.server.stdout:
            lines.append(line)
            if f":{last}" in line:
                break
        else:
            raise AssertionError("".join(lines))
        self.drain = threading.Thread(target=self.server.stdout.read)  # a full pipe would stop the server
        self.drain.start()
        return "".join(lines)

    def _stop(self) -> None:
        if self.server is None:
            return
        self.server.terminate()
        code = self.server.wait(60)
        if self.drain is not None:
            self.drain.join()
        assert self.server.stdout is not None
        self.server.stdout.close()
        self.server = None
        assert code == 0


def run_page(page: Path, folder: Path, path: str, *, checks_output: bool) -> None:
    """Runs a page from its beginning to its end."""
    with Reader(folder, path) as reader:
        for block in blocks_of(page):
            printed = reader.run(block)
            for text in block.value.split(" | ") if checks_output and block.note == "prints" else ():
                assert text in printed, f"{block.code}\nprints no {text!r}:\n{printed}"
