"""Options of the command line are the fields of dataclasses, with their defaults."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from memlm.api.params import GenerateRequest, RetrievalParams, SamplingParams, StoreWeight
from memlm.base.options import OPTION, RESEARCH, format_bytes, parse_bytes
from memlm.cli.app import app
from memlm.cli.terminal.fields import Overrides, with_fields
from memlm.server.cluster_config import ClusterConfig
from memlm.server.config import ServerConfig
from memlm.training.config import TrainConfig


def parsed(record: Any, *words: str) -> Any:
    """The record that a command gets from some words."""
    app, seen = typer.Typer(), []

    @app.command()
    @with_fields()
    def command(record: record) -> None:  # type: ignore[valid-type]
        seen.append(record)

    command.__wrapped__.__annotations__["record"] = record
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return seen[0]


def test_every_setting_of_the_server_is_an_option_with_its_default() -> None:
    settings = [*fields(ClusterConfig), *(field for field in fields(ServerConfig) if field.name != "cluster")]
    assert all(OPTION in field.metadata for field in settings)
    assert parsed(ServerConfig, "--model", "m") == ServerConfig(Path("m"))


def test_options_fill_a_dataclass_and_those_in_it() -> None:
    words = ["def", "-t", "0", "--stop", "a", "--stop", "b", "--store-name", "x=0.5", "--store-name", "y", "--no-store"]
    assert parsed(GenerateRequest, *words) == GenerateRequest(
        "def",
        sampling=SamplingParams(temperature=0, stop=("a", "b")),
        retrieval=RetrievalParams(stores=(StoreWeight("x", 0.5), StoreWeight("y")), use_store=False),
    )


@pytest.mark.parametrize(("word", "drafts"), [("auto", None), ("off", 0), ("8", 8)])
def test_drafts_are_a_word_or_a_number(word: str, drafts: int | None) -> None:
    found = parsed(GenerateRequest, "def", "--drafts", word, "--draft", "def main")
    assert found == GenerateRequest("def", drafts=drafts, draft="def main")


def test_bytes_are_parsed() -> None:
    config = ServerConfig(Path("m"))
    assert parsed(ServerConfig, "-m", "m", "--session-bytes", "2MiB") == replace(config, max_session_bytes=2 << 20)


def test_only_fields_that_were_given_override() -> None:
    overrides = Annotated[dict[str, Any], Overrides(TrainConfig)]
    assert parsed(overrides) == {}
    assert parsed(overrides, "--steps", "9", "--seed", "3") == {"steps": 9, "seed": 3}


@pytest.mark.parametrize("number", [1, 1023, 4 << 20, 3 << 40])
def test_bytes_are_formatted_as_they_are_parsed(number: int) -> None:
    assert parse_bytes(format_bytes(number)) == number


def test_help_begins_with_what_every_call_needs_and_ends_with_research() -> None:
    for words in ("generate", "answer", "chat", "eval", "serve", "index build", "tune", "score"):
        shown = CliRunner().invoke(app, [*words.split(), "--help"]).stdout
        panels = re.findall(r"^╭─ ([A-Z][\w ]*?) ─", shown, re.MULTILINE)
        assert RESEARCH not in panels[:-1], words
        assert len(panels) == len(set(panels))
        if "Model" in panels:
            assert panels.index("Model") <= 2, words
        for option in ("--spalm", "--nprobe", "--extended-attention", "--attention-window"):
            assert option not in shown.partition(f"─ {RESEARCH} ─")[0], words


def test_an_error_names_the_flag_of_an_option_that_is_called_otherwise() -> None:
    result = CliRunner().invoke(app, ["index", "build", __file__, "-m", "m", "--out", "s", "--share", "2"])
    assert str(result.exception).startswith("--share is 2.0")
