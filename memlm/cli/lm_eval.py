"""`memlm lm-eval`: tasks of the lm-evaluation-harness."""

from __future__ import annotations

import json as json_module
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlm.api.params import RetrievalParams
from memlm.cli.terminal import options
from memlm.cli.terminal.console import emit_json, out
from memlm.cli.terminal.fields import Overrides, with_fields
from memlm.errors import InvalidInput, Unavailable

if TYPE_CHECKING:
    from memlm.data.tokenizer import Tokenizer

MISSING = "lm-evaluation-harness is not installed; install it with `pip install 'memlm[lm-eval]'`"


@with_fields(leave_out=("use_store", "stores", "exclude_documents", "as_of", "loop_guard"))
def lm_eval(
    retrieval: Annotated[dict[str, Any], Overrides(RetrievalParams)],
    model: options.Model,
    tasks: Annotated[str, typer.Option(help="Names of tasks, with commas between them.")],
    store: options.Stores = None,
    include: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Take tasks from this folder, in place of the harness's own.")
    ] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples before each question.")] = None,
    limit: Annotated[int | None, typer.Option(help="Questions of each task (default: all).")] = None,
    metadata: Annotated[
        str, typer.Option(metavar="JSON", help="Settings of tasks, as '{\"max_seq_lengths\": [1024]}' of RULER.")
    ] = "{}",
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    dtype: options.Dtype = "auto",
    json: options.Json = False,
) -> None:
    """Run tasks of the lm-evaluation-harness on a model, with or without datastores."""
    try:
        from lm_eval import evaluator, simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise Unavailable(MISSING) from error
    from memlm.integrations.lm_eval import MemlmLM

    # It would ask git, which complains on standard error outside of a repository, for a hash that nothing prints.
    evaluator.get_git_commit_hash = lambda: None
    settings = _settings(metadata)
    asked = MemlmLM(model, store or (), dtype=dtype, **retrieval)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"tokenizer": _for_transformers(asked.lm.tokenizer, Path(folder)), **settings}
        results = simple_evaluate(
            model=asked, tasks=tasks.split(","), num_fewshot=num_fewshot, limit=limit, apply_chat_template=chat,
            bootstrap_iters=1000, task_manager=TaskManager(
                include_path=None if include is None else str(include), include_defaults=not include, metadata=settings
            ),
        )  # fmt: skip
    if json:
        emit_json({"results": results["results"], "versions": results["versions"]})
    else:
        out.print(make_table(results), markup=False, highlight=False)


def _settings(text: str) -> dict[str, Any]:
    """The settings of tasks that a caller gives."""
    try:
        settings = json_module.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise InvalidInput(
            f'metadata is {text[:200]!r}; expected a JSON object, as {{"max_seq_lengths": [1024]}}', field="metadata"
        )
    return settings


def _for_transformers(tokenizer: Tokenizer, folder: Path) -> str:
    """Writes a tokenizer as `transformers` reads it. Tasks that make their own texts measure these with it."""
    from memlm.data.tokenizer import SETTINGS_FILE

    tokenizer.save(folder)
    (folder / SETTINGS_FILE).write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n', encoding="utf-8")
    return str(folder)
