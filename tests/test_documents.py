"""Links of documents lead somewhere, every page is in the navigation, and the English keeps its rules."""

import ast
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARCHIVE = ROOT / "benchmarks/log/archive.md"  # kept as it was written
FOLDERS = (ROOT / "docs", ROOT / "benchmarks")
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))} - {ARCHIVE})
# Habits that make sentences hard to read, and how often 1,000 words may have them.
HABITS = {
    r"\b(?:what(?:ever)?|who(?:ever)?|nobody|somebody|anybody)\b": 1.5,
    r"\b(?:tells?|told|speaks?|spoken?|loud\w*|hears?|heard)\b": 0.5,
    r";": 3,
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose_of(path: Path) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def prose_of_documents() -> dict[str, str]:
    return {name_of(path): prose_of(path) for path in DOCUMENTS}


def docstrings() -> dict[str, str]:
    """The docstrings of each module, without code."""
    found = {}
    for path in (path for folder in ("memlm", "index", "server") for path in (ROOT / folder).rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        texts = [text for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node))]
        found[name_of(path)] = re.sub(r"`[^`\n]*`", "", "\n".join(texts))
    return found


def anchors_of(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose_of(document)):
        file, _, anchor = link.partition("#")
        target = (document.parent / file).resolve() if file else document
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


@pytest.mark.parametrize("document", [page for page in DOCUMENTS if "log" not in page.parts], ids=name_of)
def test_files_that_documents_name_exist(document: Path) -> None:  # the log names those of its commits
    for name in re.findall(
        r"`((?:memlm|index|server|tests|proto|tools)/[\w/.-]+)`", document.read_text(encoding="utf-8")
    ):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("texts_of", [prose_of_documents, docstrings], ids=["documents", "docstrings"])
@pytest.mark.parametrize("habit", HABITS)
def test_english_is_plain(texts_of: Callable[[], dict[str, str]], habit: str) -> None:
    texts = texts_of()
    counts = {name: len(re.findall(habit, text, flags=re.IGNORECASE)) for name, text in texts.items()}
    words = sum(len(re.findall(r"[A-Za-z'-]+", text)) for text in texts.values())
    assert 1000 * sum(counts.values()) / words <= HABITS[habit], {name: n for name, n in counts.items() if n}


def patterns_of_messages(quoted: str) -> list[re.Pattern[str]]:
    """A pattern for each text of the source whose fixed parts are quoted. It matches any value in the place of one."""
    patterns = []
    for path in (path for folder in ("memlm", "index", "server") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [str(part.value) if isinstance(part, ast.Constant) else None for part in parts]
            fixed = [text for text in texts if text is not None]
            if len("".join(fixed)) >= 20 and all(text in quoted for text in fixed):
                pattern = "".join(".*" if text is None else re.escape(text) for text in texts)
                patterns.append(re.compile(pattern, flags=re.DOTALL))
    return patterns


def test_messages_that_troubleshooting_quotes_are_those_of_the_source() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^> (.*)$", page, flags=re.MULTILINE)
    patterns = patterns_of_messages("\n".join(quoted))
    assert len(quoted) > 20
    unknown = [message for message in quoted if not any(pattern.fullmatch(message) for pattern in patterns)]
    assert not unknown, unknown


def test_figures_are_those_that_the_script_draws() -> None:
    script = ROOT / "docs/site/figures.py"
    drawn = runpy.run_path(str(script))
    for draw in drawn["FIGURES"]:
        file = drawn["FOLDER"] / f"{draw().name}.svg"
        text = file.read_text(encoding="utf-8")
        assert text == draw().svg(), f"{file} is stale: run python {script}"
        assert len(text) < 20_000
        assert "prefers-color-scheme:dark" in text


def test_pictures_are_described() -> None:
    for document in DOCUMENTS:
        assert not re.findall(r"!\[\]\(", document.read_text(encoding="utf-8")), document


def test_every_page_is_in_the_navigation() -> None:
    navigation = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= navigation, pages - navigation
