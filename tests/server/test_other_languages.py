"""The example clients in other languages work from the repository alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from running import RunningServer

from memlm.wire.codec import SERVICES

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "examples" / "clients"
PROMPT = "the memory"


def lines_of(server: RunningServer, *command: object, folder: Path) -> list[str]:
    words = [*map(str, command), server.address, PROMPT]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def python_lines(server: RunningServer) -> list[str]:
    return lines_of(server, sys.executable, CLIENTS / "python" / "client.py", folder=ROOT)


def test_the_python_client_lists_and_streams(python_lines: list[str]) -> None:
    stores = [line for line in python_lines if line.endswith(" entries")]
    assert [line.split(":")[0] for line in stores] == ["store"]
    assert python_lines[-1].endswith(" tokens, length")
    assert len(python_lines) == 1 + 16 + 1


@pytest.mark.packaging
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node and npm")
def test_the_javascript_client_gives_the_same(server: RunningServer, python_lines: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "clients" / "javascript"
    shutil.copytree(CLIENTS / "javascript", folder, ignore=shutil.ignore_patterns("node_modules"))
    (tmp_path / "proto").symlink_to(ROOT / "proto")
    words = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock"]
    installed = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if installed.returncode:
        pytest.skip(f"the packages of the client cannot be installed: {installed.stderr[-300:]}")
    found = lines_of(server, "node", "client.js", folder=folder)
    assert found[0] == python_lines[0]
    sources = [line.rsplit(" ", 1)[1] for line in python_lines[1:-1]]
    assert [line.rsplit(" ", 1)[1] for line in found[1:-1]] == sources
    assert found[-1] == "16 tokens, FINISH_REASON_LENGTH"


def test_the_descriptor_set_has_the_services_and_all_that_they_import() -> None:
    published = FileDescriptorSet.FromString((ROOT / "proto" / "memlm.binpb").read_bytes())
    files = {file.name for file in published.file}
    found = {f"{file.package}.{service.name}" for file in published.file for service in file.service}
    assert found == {service.full_name for service in SERVICES}
    assert all(name in files for file in published.file for name in file.dependency)
