"""The README's own commands and examples, run as they stand but for the port."""

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from memlm.model.catalog import MODELS

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!--[^>]*-->\n```(sh|python)\n(.*?)```", README, flags=re.DOTALL)


DOCS, PART = Path(__file__).parents[1] / "docs", 1500
NOTE = "# Gateway\n\nThe gateway listens on port 7443. It forwards requests to the registry.\n"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def memlm(line: str) -> list[str]:
    words = shlex.split(line)
    assert words[0] == "memlm"
    return [sys.executable, "-m", *words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's texts."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "notes").mkdir()
    (folder / "notes" / "gateway.md").write_text(NOTE, encoding="utf-8")
    for name, document in {"notes": "service.md", "heldout": "datastore.md", "unseen": "model.md"}.items():
        (folder / name).mkdir(exist_ok=True)
        text = (DOCS / document).read_text(encoding="utf-8")
        for part in range(2):
            (folder / name / f"part-{part}.md").write_text(text[part * PART : (part + 1) * PART], encoding="utf-8")
    return folder


@pytest.mark.packaging
@pytest.mark.real_model
@pytest.mark.skipif(MODELS["smollm2"].path is None, reason="not installed; `memlm models pull smollm2` installs it")
def test_the_readme_does_what_it_says(folder):
    (_, by_hand), (_, while_it_serves), (_, in_process), (_, over_grpc) = BLOCKS
    port = str(free_port())
    server = None
    answers = {}  # by the first two words behind memlm
    try:
        for line in by_hand.replace("50051", port).strip().splitlines():
            if line.startswith("memlm serve"):
                server = subprocess.Popen(memlm(line), cwd=folder, stderr=subprocess.PIPE, text=True)
                assert server.stderr is not None
                assert any(f":{port}" in server.stderr.readline() for _ in range(10))
            else:
                answers[" ".join(line.split()[1:3])] = run(memlm(line), folder)
        assert "7443" in answers['generate "Our']
        assert "gateway.md" in answers["index search"]
        run([sys.executable, "-c", in_process], folder)
        run([sys.executable, "-c", over_grpc.replace("50051", port)], folder)
        served = []
        for line in while_it_serves.strip().splitlines():
            there = line.replace("50051", port) if "--target" in line else f"{line} --target localhost:{port}"
            served.append(run(memlm(there), folder))
        assert "7443" in served[0]
        assert "deleted 1 documents" in served[-1]
    finally:
        if server is not None:
            server.terminate()
            assert server.wait(60) == 0
            server.stderr.close()


def test_the_first_commands_are_targets_of_the_makefile():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z]+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
