"""`memlm eval`."""

from __future__ import annotations

from typing import Annotated, Any

from memlm.api.params import RetrievalParams
from memlm.base.figures import figure
from memlm.base.progress import LOADING
from memlm.cli.terminal import options
from memlm.cli.terminal.console import ConsoleProgress, emit_json, print_table, table
from memlm.cli.terminal.fields import Overrides, with_fields
from memlm.cli.terminal.interruption import on_interrupt, this_command


@with_fields(leave_out=("use_store", "stores", "exclude_documents", "as_of", "loop_guard"))
def evaluate(
    texts: options.Texts,
    model: options.Model,
    retrieval: Annotated[dict[str, Any], Overrides(RetrievalParams)],
    store: options.Stores = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Measure perplexity on held-out text, of the model alone and with its datastore.

    Perplexity per word counts a line end as one more word, as papers on WikiText do.
    """
    documents = options.corpus_of(texts)
    with on_interrupt(lambda: f"nothing was changed; to begin anew: {this_command()}"), ConsoleProgress() as progress:
        progress(LOADING, 0, 1)
        from memlm.evaluation import evaluate as run
        from memlm.language_model import load

        with load(model, store or (), dtype=dtype, device=device) as lm:
            evaluation = run(lm, documents, progress=progress, **retrieval)
    if json:
        emit_json({**_figures(evaluation.total), "texts": {name: _figures(s) for name, s in evaluation.texts.items()}})
        return
    shown = table("", "bits per byte", "per token", "per word", "nats", title="perplexity")
    for name, figures in (("model", evaluation.total.base), ("with datastore", evaluation.total.knn)):
        if figures:
            rates = (figures.bits_per_byte, figures.token_perplexity, figures.word_perplexity, figures.nll)
            shown.add_row(name, *(figure(rate) for rate in rates))
    print_table(shown)


def _figures(score: Any) -> dict[str, Any]:
    """A score as JSON: counts, the final figures, and with a datastore those of the model and of the mixture."""
    from dataclasses import asdict

    shown = {"tokens": score.tokens, "words": score.words, "bytes": score.bytes, **asdict(score.figures)}
    if score.knn is not None:
        used = {"k": score.k, "lam": score.lam, "temperature": score.knn_temperature}
        shown |= {"base": asdict(score.base), "knn": {**asdict(score.knn), **used}}
    return shown
