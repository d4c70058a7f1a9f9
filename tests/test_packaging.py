"""What holds of the package as a whole: imports one way, light faces, generated code, a wheel that works."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from chats import PLAIN, PLAIN_TOKENS, give_template
from conftest import SHAPE
from document_blocks import run_page

import memlm
from memlm.data.tokenizer import Tokenizer
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import save_checkpoint
from memlm.server.local import SERVING

ROOT = Path(__file__).parents[1]
FOLDERS = {"memlm": "memlm", "memlm.index": "index", "memlm.server": "server", "memlm.v1": "proto/memlm/v1"}
# Lowest floor first. A module imports from its own room and from the floors below it, nothing else.
FLOORS = (
    "v1",
    "errors",
    "base",
    "index",
    "index.store",
    "api",
    "data",
    "model",
    "retrieval",
    "training indexing generation inspect",
    "distributed",
    "prompting",
    "language_model",
    "evaluation",
    "wire",
    "client",
    "integrations",
    "server.sites",
    "server.telemetry",
    "server.cluster_config",
    "server.config",
    "server.registry server.ownership server.quota",
    "server.processes",
    "server.inference",
    "server.jobs",
    "server.preload",
    "server.frontend",
    "server.http",
    "server.main",
    "server.local",
    "zoo",
    "bench",
    "cli",
    "__main__",
)
FACES = {"memlm", "memlm.index", "memlm.server"}  # their names are loaded when they are first used


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            inner = file.relative_to(ROOT / folder).with_suffix("")
            found[".".join([package, *(part for part in inner.parts if part != "__init__")])] = file
    return found


def room_of(module: str) -> str:
    rooms = [room for floor in FLOORS for room in floor.split()]
    inner = module.removeprefix("memlm.")
    found = [room for room in rooms if f"{inner}.".startswith(f"{room}.")]
    assert found, f"{module} is in no room of FLOORS"
    return max(found, key=len)


def floor_of(room: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if room in floor.split())


def imports_of(file: Path, *, late: bool) -> set[str]:
    """The modules of ours that a file imports; `late` counts those inside functions too."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if late else iter(tree.body)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file} imports relatively"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name in modules()}


def test_imports_run_one_way():
    for module, file in modules().items():
        if module in FACES:
            continue
        room = room_of(module)
        for imported in imports_of(file, late=True) - FACES:
            other = room_of(imported)
            assert other == room or floor_of(other) < floor_of(room), f"{module} imports {imported}"


@pytest.mark.parametrize("folder", ["memlm/model", "memlm/training", "memlm/generation", "memlm/cli", "server"])
def test_the_core_names_no_paper_of_the_zoo(folder):
    """Not in a string either: the zoo registers itself, and its parts say by fields of `Part` what they need."""
    files = (file for room in (".", "demix", "retro") for file in (ROOT / "memlm/zoo" / room).glob("*.py"))
    docs = [ast.get_docstring(ast.parse(file.read_text())) or "" for file in files]
    papers = {found[1] for doc in docs if (found := re.search(r"arXiv (\d{4}\.\d{5})", doc))}
    assert len(papers) > 15
    names = ("memlm.zoo", "retro", "DEMix", "Branch-Train-Merge", "megabyte", "Decision Transformer", *papers)
    named = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names), re.IGNORECASE)
    for file in sorted((ROOT / folder).rglob("*.py")):
        assert not named.findall(file.read_text()), file


def test_there_is_no_import_cycle():
    graph = {module: imports_of(file, late=False) - {module, "memlm"} for module, file in modules().items()}
    state: dict[str, int] = defaultdict(int)

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert state[module] != 1, " -> ".join((*path, module))
        if state[module] == 0:
            state[module] = 1
            for imported in sorted(graph[module]):
                visit(imported, (*path, module))
            state[module] = 2

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize(
    "statement",
    [
        "import memlm.client, memlm.client.aio_client",
        "import memlm; memlm.Client; memlm.AsyncClient; memlm.GenerateRequest",
        "import memlm.errors, memlm.base.clock, memlm.base.cpu, memlm.base.files, "
        "memlm.base.machine, memlm.base.printable, memlm.base.progress, memlm.base.steps, "
        "memlm.base.storable, memlm.base.version",
        "import memlm.server.config, memlm.server.frontend.service, memlm.server.main, memlm.server.http.port",
        "import sys; sys.argv = ['memlm', '--help']\nfrom memlm.cli import main\ntry: main()\nexcept SystemExit: pass",
    ],
)
def test_light_faces_load_neither_torch_nor_faiss(statement, tmp_path):
    check = "\nimport sys\nassert not {'torch', 'faiss'} & set(sys.modules), 'heavy'"
    subprocess.run([sys.executable, "-c", statement + check], check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)


def test_the_public_names_are_there_and_listed():
    for name in memlm.__all__:
        assert getattr(memlm, name) is not None
    assert dir(memlm) == sorted(memlm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        memlm.nothing  # noqa: B018


def test_no_module_takes_the_place_of_a_public_name():
    """Importing memlm.x sets x on the package, and a name that is set there is asked of nobody again."""
    first = {name: getattr(memlm, name) for name in memlm.__all__}
    for name, value in first.items():
        assert getattr(memlm, name) is value
        assert not isinstance(value, ModuleType), name


@pytest.mark.packaging
def test_the_generated_code_is_fresh(tmp_path):
    sources = list((ROOT / "proto" / "memlm").rglob("*.proto"))
    variables = [f"OUT={tmp_path}", f"BIN={Path(sys.executable).parent}", "STAMP=pyproject.toml"]
    subprocess.run(["make", "--silent", "-C", str(ROOT), "proto", *variables], check=True)
    generated = sorted(file for file in tmp_path.rglob("*") if file.is_file())
    assert len(generated) == 3 * len(sources) + 1  # the descriptor set
    for file in generated:
        committed = ROOT / "proto" / file.relative_to(tmp_path)
        assert committed.read_bytes() == file.read_bytes(), f"{committed.name} is stale: run `make proto`"


@pytest.mark.packaging
def test_a_compiler_needs_the_descriptor_set_alone(tmp_path):
    """As other languages generate their code from a checkout, without the protos of googleapis."""
    files = [path.relative_to(ROOT / "proto").as_posix() for path in (ROOT / "proto").rglob("*.proto")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--descriptor_set_in={ROOT / 'proto' / 'memlm.binpb'}"]
    subprocess.run([*command, f"--python_out={tmp_path}", *files], cwd=tmp_path, check=True)
    assert len(list(tmp_path.rglob("*_pb2.py"))) == len(files)


def test_the_synchronous_client_is_fresh():
    spec = importlib.util.spec_from_file_location("generate_sync", ROOT / "tools" / "generate_sync.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    for source in generator.SOURCES:
        target = generator.target_of(source)
        assert target.read_text() == generator.synchronous(source), f"{target.name} is stale: run `make client`"


def test_the_toolchain_is_the_oldest_that_the_bounds_allow():
    text = (ROOT / "pyproject.toml").read_text()
    tools = re.search(r'"grpcio-tools==([\d.]+)"', text)
    runtime = re.search(r'"grpcio>=([\d.]+),', text)
    assert tools
    assert runtime
    assert tools[1] == runtime[1]


def test_every_declared_dependency_is_pinned_within_its_bounds():
    from importlib.metadata import requires

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    pins = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pinned}
    for requirement in map(Requirement, requires("memlm") or ()):
        if (name := canonicalize_name(requirement.name)) != "memlm":  # an extra that names other extras
            assert requirement.specifier.contains(pins[name], prereleases=True), name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a source distribution, as a package index would see them."""
    source = tmp_path_factory.mktemp("source")
    for name in ("memlm", "index", "server", "proto"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", source]
    subprocess.run(command, check=True, cwd=source, capture_output=True)
    (wheel,) = (source / "dist").glob("*.whl")
    assert len(list((source / "dist").glob("*.tar.gz"))) == 1
    return wheel


@pytest.mark.packaging
def test_the_wheel_holds_the_contract_and_the_types(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "memlm/py.typed",
        "memlm/v1/generation.proto",
        "memlm/v1/datastores.proto",
        "memlm/index/store/datastore.py",
    } <= set(names)
    assert {name.split("/")[0] for name in names} == {"memlm", f"memlm-{memlm.__version__}.dist-info"}
    assert sum(name.endswith(".py") for name in names) == len(modules())


@pytest.mark.packaging
def test_an_installed_wheel_gives_a_working_command(wheel, tmp_path):
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(install, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    where = (
        "import memlm, memlm.index.store.writer as w, memlm.server.inference.worker; print(memlm.__file__, w.__file__);"
        "from memlm.base.plugins import registered; assert 'mixer.hyper' in registered('memlm.parts')"
    )
    done = subprocess.run(
        [sys.executable, "-c", where], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert all(path.startswith(str(target)) for path in done.stdout.split())
    done = subprocess.run(
        [target / "bin" / "memlm", "--version"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, memlm.__version__)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The folder of the commands of an environment that has the tests' packages, but no memlm."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    (packages,) = (tmp_path / "bare").glob("lib/*/site-packages")
    # Of a folder that is named in a .pth, Python reads no .pth: memlm of an editable installation is not found.
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    return tmp_path / "bare/bin"


@pytest.fixture
def clone(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """The checkout as a clone has it, with a tiny model that is called as that of the README."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git, and a clone of the repository")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "clone" / name)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **{**SHAPE, "context_length": 512})
    save_checkpoint(tmp_path / "clone/smollm2", Decoder(config), tokenizer)
    give_template(tmp_path / "clone/smollm2", PLAIN, PLAIN_TOKENS)
    return tmp_path / "clone"


@pytest.mark.packaging
def test_the_commands_of_the_readme_run_inside_a_clone(wheel, bare, clone):
    """Python puts the current folder before the installed package."""
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        bare / "python",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*install, wheel], check=True, capture_output=True)
    run_page(clone / "README.md", clone, f"{bare}:{os.environ['PATH']}", checks_output=False)


@pytest.mark.packaging
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_checkout_is_whole_without_an_installation(bare, clone, tmp_path, method, inside):
    lines = (
        "import multiprocessing, memlm.v1.generation_pb2",
        "from memlm.server.processes import file_limit",
        "import importlib.metadata; importlib.metadata.entry_points = lambda group: ()",
        "from memlm.base.plugins import registered; assert 'mixer.hyper' in registered('memlm.parts')",
        f"print(multiprocessing.get_context('{method}').Pool(1).apply(file_limit))",
    )
    where = {"cwd": clone} if inside else {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(clone)}}
    done = subprocess.run([bare / "python", "-c", "\n".join(lines)], **where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().isdigit()


@pytest.mark.packaging
def test_a_checkout_serves_without_an_installation(bare, clone):
    command = [bare / "python", "-m", "memlm", "serve", "--model", "smollm2", "--port", "0"]
    with subprocess.Popen(command, cwd=clone, stderr=subprocess.PIPE, text=True) as server:
        output = ""
        for line in server.stderr:
            output += line
            if line.startswith(SERVING):
                break
        server.terminate()
        server.stderr.read()
    assert (server.returncode, SERVING in output) == (0, True), output
