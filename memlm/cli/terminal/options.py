"""Options that several commands share: one name, one meaning, one help text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memlm.api.datastores import parse_fields
from memlm.api.params import SAMPLING
from memlm.base.options import RESEARCH, parse_bytes
from memlm.base.texts import text_of
from memlm.errors import InvalidInput

if TYPE_CHECKING:
    from memlm.cli.terminal.corpus_files import CorpusFiles
    from memlm.data.corpus import Corpus

Corpora = Annotated[
    list[str],
    typer.Argument(
        metavar="CORPUS...",
        help="Files or folders: text, HTML, PDF, Office, EPUB, mail, JSON Lines, Parquet. - is stdin.",
    ),
]
Texts = Annotated[list[str], typer.Argument(metavar="TEXT...", help="Held-out files or folders.")]
Engine = Annotated[
    str,
    typer.Option(
        metavar="local|ray",
        rich_help_panel="Cluster",
        help="Read in this process, or on the nodes of the Ray cluster of RAY_ADDRESS, by default this machine.",
    ),
]
Glob = Annotated[str, typer.Option(help="Files to read in folders.")]
Hidden = Annotated[
    bool,
    typer.Option("--hidden", help="Also read hidden files, environments, and files that .gitignore excludes."),
]
Check = Annotated[
    str,
    typer.Option(metavar="quick|full|none", help="Check the result: briefly, in full, or not at all."),
]
Keys = Annotated[
    str,
    typer.Option(
        "--keys",
        metavar="auto|now|none",
        help="Make keys, by which generation finds neighbors: at once, not now, or (auto) if it takes below a minute.",
    ),
]
OnError = Annotated[
    str, typer.Option(metavar="skip|fail", help="Skip unusable files, or fail before anything is written.")
]
Report = Annotated[
    typer.FileTextWrite | None,
    typer.Option(
        "--report", metavar="FILE", encoding="utf-8", lazy=False, rich_help_panel="Output",
        help="Write as JSON Lines why files were left out, and what was stored.",
    ),
]  # fmt: skip
Prompt = Annotated[
    str | None,
    typer.Argument(metavar="[PROMPT]", help="The text to continue. - is standard input.", show_default=False),
]
PromptFile = Annotated[
    Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the text from a file. - is standard input.")
]
TracedText = Annotated[
    str | None,
    typer.Argument(metavar="[TEXT]", help="The text to trace. - is standard input.", show_default=False),
]
ScoredText = Annotated[
    str | None,
    typer.Argument(metavar="[TEXT]", help="The text to score. - is standard input.", show_default=False),
]
Purge = Annotated[
    bool,
    typer.Option("--purge", help="Remove deleted documents from all files, and abandon interrupted additions."),
]
Model = Annotated[
    Path,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="Folder, GGUF file, hub id, or smollm2.", rich_help_panel="Model"
    ),
]
ModelOrTarget = Annotated[
    Path | None,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="Folder, GGUF file, hub id, or smollm2.", rich_help_panel="Model"
    ),
]
Encoder = Annotated[
    str,
    typer.Option(
        "--encoder",
        metavar="FOLDER|auto|none",
        help="BERT encoder whose vectors find passages by meaning. auto: the installed one, if there is one.",
        rich_help_panel="Passages",
    ),
]
StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="Datastore folder.")]
AnyStore = Annotated[Path, typer.Argument(metavar="STORE", help="Datastore folder, or its name on a server.")]
Stores = Annotated[
    list[Path] | None,
    typer.Option("--store", "-s", metavar="FOLDER", help="Datastore folder. Repeatable.", rich_help_panel="Model"),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="auto|float32|bfloat16|float16|int8|int4|gguf",
        help="Compute type. auto: gguf for such files, bfloat16 where it is fast, else float32. int8, int4 round.",
        rich_help_panel="Model",
    ),
]
AttentionWindow = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Latest tokens that a token sees, beside the first four. Texts then have any length.",
        rich_help_panel=RESEARCH,
    ),
]
ExtendedAttention = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="Tokens beyond --attention-window that each head also sees, those with the best keys.",
        rich_help_panel=RESEARCH,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|cuda|cuda:N|mps", help="Where to compute. auto: the first GPU.", rich_help_panel="Model"
    ),
]
Yes = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask, on a terminal, before work of more than ten minutes.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel="Output")]

ShowSources = Annotated[
    bool,
    typer.Option(
        "--show-sources", help="Shade tokens by the share of p_kNN, and list their sources.", rich_help_panel="Output"
    ),
]


def corpus_of(
    paths: Sequence[str | Path],
    glob: str = "**/*",
    on_error: str = "skip",
    *,
    hidden: bool = False,
    files: CorpusFiles | None = None,
) -> Corpus:
    """The corpus of a command, which reports the fate of each file to `files`, or prints each problem. Raises
    InvalidInput for one without text, and with `on_error="fail"` UnusableText for one that is not all text, before a
    model is loaded.
    """
    from memlm.cli.terminal.console import print_problem
    from memlm.data.corpus import Corpus

    if files is None:
        corpus = Corpus(paths, glob, on_error, print_problem, hidden=hidden)
    else:
        corpus = Corpus(paths, glob, on_error, files.on_problem, hidden=hidden, on_document=files.on_document)
    corpus.require_text()
    return corpus


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The text from the command line, a file or standard input, which has to be one of them."""
    if (prompt is None) == (file is None):
        raise typer.BadParameter("give a text, or --file FILE (- is standard input)")
    if prompt is not None and prompt != "-":
        return prompt
    # Editors end a file with a line end, and so does `echo`, which nobody means to continue.
    return read_text(file or Path("-")).removesuffix("\n")


def read_text(path: Path) -> str:
    """The text of a file, or of standard input for `-`. Raises InvalidInput, naming it, where there is none."""
    try:
        return text_of(sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes())
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 at byte {error.start:,}; give a text file") from None
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read ({error.strerror}); give a text file, or - for standard input"
        ) from None


def metadata_fields(where: Sequence[str], option: str = "where") -> dict[str, str]:
    """Parses FIELD=VALUE of metadata. Raises BadParameter, with the name of the option."""
    try:
        return parse_fields(where, option)
    except InvalidInput as error:
        raise typer.BadParameter(f"--{error}") from None


def num_bytes(text: str | None) -> int | None:
    """Parses a number of bytes, if one was given. Raises BadParameter."""
    try:
        return None if text is None else parse_bytes(text)
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from None


MAX_TOKENS = 512  # of an answer: a small model may not find its end
TEMPERATURE = 0.3  # of chats and answers
# Fields that have options of their own in chats and answers, or none: `generate` and the library have them.
NOT_OF_ANSWERS = (
    "temperature", "max_tokens", "session", "resume_s", "early_exit", "draft", "nprobe", "spalm", "loop_guard",
    "context_cache",
)  # fmt: skip

Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=SAMPLING)]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", help="Maximum number of tokens of an answer.", rich_help_panel=SAMPLING)
]
