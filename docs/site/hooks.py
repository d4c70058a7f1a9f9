"""Pages with a source elsewhere: README, changelog, benchmarks; references of the CLI and of gRPC."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from memlm.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
ONLY_IN_THE_REPOSITORY = (
    r"\[([^]]*)\]\((?:\.\./)*"
    r"(?:LICENSE|SECURITY\.md|CONTRIBUTING\.md|Containerfile|compose\.yaml|ops/[\w.-]+|(?:examples|proto)/[^)]*"
    r"|(?:benchmarks/)?(?:log|tables|results)/[^)]*)\)"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages with a source outside of docs/, and the generated references."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "reference/cli.md", content=cli_reference()))
    files.append(File.generated(config, "reference/grpc.md", content=grpc_reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links of the repository links of the site; links to files that are no pages become text."""
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(ONLY_IN_THE_REPOSITORY, r"\1", markdown)
    for source, target in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(source)}", f"]({up}{target}", markdown)
    return re.sub(r"\]\((?:\.\./)?docs/", f"]({up}", markdown)


def cli_reference() -> str:
    """Every command with its help, arguments and options."""
    return (
        "# Command line\n\nExit codes: 0 for success, 1 for an error, 2 for wrong usage. A parameter without dashes is"
        " a setting of the file and of the environment ([configuration](../configuration.md)).\n"
        + "".join(command_reference(typer.main.get_command(app), "memlm"))
    )


def command_reference(command: Any, name: str) -> list[str]:
    """The sections of a command and of those below it, in the order in which help lists them."""
    if hasattr(command, "commands"):
        return [part for key, sub in command.commands.items() for part in command_reference(sub, f"{name} {key}")]
    parts = [f"\n## {name}\n\n{cell(command.help)}\n"]
    if command.epilog:
        parts.append(f"\n```sh\n{command.epilog.removeprefix('Example: ')}\n```\n")
    rows = [parameter_row(parameter) for parameter in command.params]
    return [*parts, "\n| parameter | value | default | meaning |\n|---|---|---|---|\n", *rows]


def parameter_row(parameter: Any) -> str:
    """A row of the table of a command: its options, value, default and help."""
    is_argument = not hasattr(parameter, "is_flag")
    names = [parameter.metavar or parameter.name.upper()] if is_argument else parameter.opts + parameter.secondary_opts
    names = names or [parameter.name]  # a setting of the file and the environment
    value = "" if is_argument or parameter.is_flag else parameter.metavar or "value"
    default = "required" if parameter.required else "" if callable(parameter.default) else parameter.default
    shown = "" if default in (None, False, (), []) else str(default)
    named = ", ".join(f"`{one}`" for one in names)
    return f"| {named} | {cell(value)} | {cell(shown)} | {cell(parameter.help)} |\n"


def cell(text: str | None) -> str:
    """A text as a cell of a table."""
    return re.sub(r"\s+", " ", (text or "").replace("\\[", "[")).replace("|", "\\|").replace("<", "&lt;").strip()


def grpc_reference() -> str:
    """The contract: each service and message of the proto files with its comments."""
    parts = ["# gRPC\n\nThe package is `memlm.v1`.\n"]
    for file in sorted((ROOT / "proto/memlm/v1").glob("*.proto")):
        text = file.read_text(encoding="utf-8")
        parts.append(f"\n## {file.name}\n\n{unwrapped(text[: text.index('syntax = ')])}\n")
        for comment, block, kind, name in re.findall(
            r"^((?://[^\n]*\n)*)((service|message|enum) (\w+) \{(?:[^\n]*\}$|.*?^\}$))", text, re.MULTILINE | re.DOTALL
        ):
            parts.append(f"\n### {kind} {name}\n\n{unwrapped(comment)}\n\n```proto\n{block}\n```\n")
    return "".join(parts)


def unwrapped(comment: str) -> str:
    """A comment as one paragraph."""
    return cell(re.sub(r"^// ?", "", comment, flags=re.MULTILINE))
