"""What `memlm bench memory` tells of a memory, held against memories whose worth is known."""

import pytest
import torch
from conftest import SHAPE
from reports import figures_of
from typer.testing import CliRunner

from memlm.bench import memory as bench
from memlm.bench.memory import bench_memory
from memlm.cli.app import app
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.model import Decoder, ModelConfig
from memlm.model.checkpoint import save_checkpoint
from memlm.retrieval.encoder import score_tokens

pytestmark = pytest.mark.exhaustive

KINDS = ("off", "another_documents", "zero_values", "faiss")


def planted(folder, tokenizer, *, gate: float, scale: float = 6.0):
    """A random model whose memory mixes in by a given gate."""
    config = ModelConfig.from_dict(
        {**SHAPE, "vocab_size": tokenizer.vocab_size, "memorizing": {"layers": [1], "top_k": 8, "mixing": "tanh"}}
    )
    torch.manual_seed(0)
    decoder = Decoder(config)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("gate_H"):
                parameter.fill_(gate)
            elif parameter.dim() == 2:
                parameter.mul_(scale)
    save_checkpoint(folder, decoder, tokenizer)
    return decoder.eval()


def test_a_shut_gate_makes_every_memory_worth_nothing(corpus_folder, tokenizer, tmp_path):
    planted(tmp_path / "m", tokenizer, gate=0.0)
    figures = bench_memory(tmp_path / "m", Corpus([corpus_folder]))
    assert [figures[f"nats_more_{kind}"] for kind in KINDS] == [0.0] * 4
    assert figures["gates"] == [0.0] * SHAPE["num_heads"]


def test_an_open_gate_shows_what_each_change_costs(corpus_folder, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "FAISS_FROM", 300)
    monkeypatch.setattr("memlm.model.knn_memory.FAISS_FROM", 300)
    monkeypatch.setattr("memlm.model.knn_memory.CELL_SIZE", 16)  # many cells, of which few are read: some are missed
    monkeypatch.setattr("memlm.model.knn_memory.NPROBE", 2)
    decoder = planted(tmp_path / "m", tokenizer, gate=2.0)
    figures = bench_memory(tmp_path / "m", Corpus([corpus_folder]))
    assert len({figures[f"nats_more_{kind}"] for kind in KINDS}) == 4  # each is another memory
    assert all(figures[f"nats_more_{kind}_error"] > 0 for kind in KINDS)
    assert figures["faiss_searches"] > 0
    assert 0.3 < figures["faiss_recall"] < 1
    assert 0.3 < figures["faiss_softmax_mass"] < 1
    encoded = sorted((tokenizer.encode(document.text) for document in Corpus([corpus_folder])), key=len)
    nats = tokens = 0
    for shorter, longer in zip(encoded[0::2], encoded[1::2], strict=True):
        for ids in (shorter, longer[: len(shorter)]):
            nats, tokens = nats - float(score_tokens(decoder, ids, tokenizer.start_id).sum()), tokens + len(ids)
    assert figures["tokens"] == tokens
    assert figures["nats_per_token"] == pytest.approx(nats / tokens, rel=1e-5)


def test_the_command_tells_all_of_it_and_refuses_a_model_without_memory(
    corpus_folder, tokenizer, model_folder, tmp_path
):
    planted(tmp_path / "m", tokenizer, gate=1.0)
    command = ["bench", "memory", str(corpus_folder), "--max-tokens", "501", "--json", "--model", str(tmp_path / "m")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert figures_of(result.stdout)["tokens"] == 502
    with pytest.raises(InvalidInput, match="--memorizing-layers"):
        bench_memory(model_folder, Corpus([corpus_folder]))
    with pytest.raises(InvalidInput, match="two documents"):
        bench_memory(tmp_path / "m", Corpus([corpus_folder / "doc-0.txt"]))
