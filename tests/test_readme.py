"""The README's own commands and examples, run as they stand but for the time that training takes and the port."""

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from texts import make_text

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!--[^>]*-->\n```(sh|python)\n(.*?)```", README, flags=re.DOTALL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def memlm(line: str) -> list[str]:
    words = shlex.split(line)
    assert words[0] == "memlm"
    return [sys.executable, "-m", *words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Somebody's own texts."""
    folder = tmp_path_factory.mktemp("readme")
    for number, (name, files) in enumerate({"learn": 3, "remember": 4, "heldout": 2, "unseen": 2}.items()):
        (folder / name).mkdir()
        for chapter in range(files):
            text = make_text(10 * number + chapter, 600)
            (folder / name / f"chapter-{chapter}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.packaging
def test_the_readme_does_what_it_says(folder):
    (_, by_hand), (_, while_it_serves), (_, in_process), (_, over_grpc) = BLOCKS
    port = str(free_port())
    server = None
    try:
        for line in by_hand.replace("--minutes 5", "--minutes 0.05").replace("50051", port).strip().splitlines():
            if line.startswith("memlm serve"):
                server = subprocess.Popen(memlm(line), cwd=folder, stderr=subprocess.PIPE, text=True)
                assert server.stderr is not None
                assert f":{port}" in server.stderr.readline()
            else:
                run(memlm(line), folder)
        run([sys.executable, "-c", in_process], folder)
        run([sys.executable, "-c", over_grpc.replace("50051", port)], folder)
        answers = [run(memlm(line), folder) for line in while_it_serves.replace("50051", port).strip().splitlines()]
        assert "deleted 1 documents" in answers[-1]
    finally:
        if server is not None:
            server.terminate()
            assert server.wait(30) == 0
            server.stderr.close()


def test_the_first_commands_are_targets_of_the_makefile():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z]+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
