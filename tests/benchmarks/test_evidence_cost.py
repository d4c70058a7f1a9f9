"""What each way of remembering costs, in `benchmarks evidence`: energy, medians, bytes, and the command."""

from __future__ import annotations

import json
import shutil
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from texts import make_text
from typer.testing import CliRunner

from benchmarks import energy as machine
from benchmarks.commands import app
from benchmarks.energy import EnergyMeter, gpu_joules, resident_bytes
from benchmarks.evidence import cost as evidence_cost
from benchmarks.evidence import passages as evidence_passages
from benchmarks.evidence.cost import DERIVED, FOR_KEYS, PASSAGES, Turn, disk_bytes, figures_of
from benchmarks.evidence.domains import ADAPTIVE, ALONE, BOTH, CACHE, ONE_LAM, WAYS
from memlm.index.store.datastore import Datastore
from memlm.language_model import LanguageModel
from memlm.retrieval.adaptive import AdaptiveLam
from memlm.retrieval.own_past import CONTEXT, ContextSettings

LAM = AdaptiveLam(0.3, (-0.5, 0.2, 1.5, 0.1, -0.7), (1.0, 0.5, 0.5, 1.0, -1.0), (0.5, 0.5, 0.3, 0.5, 0.8))


def powercap(root: Path, **zones: tuple[str, int, int]) -> None:
    """Writes zones of RAPL as the kernel shows them: a name, a counter in microjoules, and where it begins anew."""
    for zone, (name, counter, most) in zones.items():
        folder = root / f"intel-rapl:{zone.removeprefix('z').replace('_', ':')}"
        folder.mkdir(exist_ok=True)
        for file, value in (("name", name), ("energy_uj", counter), ("max_energy_range_uj", most)):
            (folder / file).write_text(f"{value}\n")


def test_energy_is_that_of_whole_processors_also_where_a_counter_begins_anew(tmp_path):
    powercap(
        tmp_path, z0=("package-0", 1_000_000, 10_000_000), z0_0=("core", 400, 10_000_000),
        z1=("package-1", 9_500_000, 10_000_000), z2=("psys", 700, 10_000_000),
    )  # fmt: skip
    meter = EnergyMeter(tmp_path)
    before = meter.read()
    powercap(
        tmp_path, z0=("package-0", 3_500_000, 10_000_000), z0_0=("core", 900_400, 10_000_000),
        z1=("package-1", 1_500_000, 10_000_000), z2=("psys", 8_000_700, 10_000_000),
    )  # fmt: skip
    assert meter.joules(before, meter.read()) == pytest.approx(2.5 + 2.0)


def test_no_energy_is_given_where_the_machine_does_not_tell_of_each_processor(tmp_path):
    assert EnergyMeter(tmp_path / "none").read() is None
    powercap(tmp_path, z0=("package-0", 5, 10), z1=("package-1", 5, 10))
    meter = EnergyMeter(tmp_path)
    before = meter.read()
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert meter.read() is None
    assert meter.joules(before, meter.read()) is None


def test_figures_are_medians_and_ratios_are_those_of_the_same_prompt():
    alone = [Turn(0.1, 0.9, 10, None), Turn(0.4, 3.6, 10, None), Turn(0.2, 0.8, 10, None)]
    turns = [Turn(0.2, 1.8, 10, 4.0), Turn(0.5, 1.5, 5, 5.0), Turn(0.3, 2.7, 10, 6.0)]
    figures = figures_of(turns, alone)
    assert figures["tokens_per_s"] == pytest.approx(statistics.median([9 / 1.8, 4 / 1.5, 9 / 2.7]))
    assert figures["first_token_ms"] == pytest.approx(300)
    # 0.2 s a token over 0.1, 0.4 over 0.4, and 0.3 over 0.1.
    assert figures["time_over_alone"] == pytest.approx(2.0)
    assert [figures[f"time_over_alone_{end}"] for end in ("least", "most")] == pytest.approx([1.0, 3.0])
    assert figures["joules_per_token"] == pytest.approx(0.6)
    assert not {"joules_per_token", "gpu_joules_per_token"} & figures_of(alone, alone).keys()


def test_energy_of_a_gpu_is_a_figure_of_its_own():
    turns = [Turn(0.2, 1.8, 10, None, 4.0), Turn(0.5, 1.5, 5, None, 5.0), Turn(0.3, 2.7, 10, None, 6.0)]
    figures = figures_of(turns, turns)
    assert figures["gpu_joules_per_token"] == pytest.approx(0.6)
    assert "joules_per_token" not in figures
    assert gpu_joules(torch.device("cpu")) is None


@pytest.mark.skipif(
    machine.pynvml is None or not torch.cuda.is_available(), reason="needs an NVIDIA GPU and nvidia-ml-py"
)
def test_a_gpu_that_computes_uses_energy():
    device, numbers = torch.device("cuda"), torch.randn(4096, 4096, device="cuda")
    before = gpu_joules(device)
    if before is None:
        pytest.skip("this card does not count its energy")
    for _ in range(300):
        numbers = torch.tanh(numbers @ numbers)
    torch.cuda.synchronize()
    after = gpu_joules(device)
    assert after is not None
    assert after > before + 1


def test_bytes_are_those_of_the_files_that_a_way_reads(tmp_path):
    for number, name in enumerate(("a/keys.npy", "a/index.faiss", "a/values.npy", "a/words.sqlite", "CURRENT")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(10**number))
    assert disk_bytes(tmp_path) == 11111
    assert disk_bytes(tmp_path, DERIVED) == 10111
    assert disk_bytes(tmp_path, FOR_KEYS) == 11100


def test_the_resident_bytes_grow_with_an_array_that_is_written():
    import numpy as np

    before = resident_bytes()
    if before is None:
        pytest.skip("this system has no /proc/self/statm")
    held = np.ones(64 << 20, np.uint8)
    after = resident_bytes()
    assert after is not None
    assert held[-1] == 1
    assert after - before > 48 << 20


def test_each_way_searches_what_it_names(checkpoint, store_folder, tmp_path, monkeypatch):
    shutil.copytree(store_folder, tmp_path / "store")
    with Datastore.open(tmp_path / "store") as datastore:
        datastore.save_defaults(replace(datastore.snapshot.defaults, adaptive=asdict(LAM)))
    monkeypatch.setattr(evidence_cost, "TOKENS", 6)
    monkeypatch.setattr(evidence_passages, "ROOM", 12)
    with LanguageModel(checkpoint) as bare, LanguageModel(checkpoint) as lm:
        for each in (bare, lm):
            each.engine.sessions.context_settings = ContextSettings(k=5, temperature=0.5, lam=0.4)
        prompt = lm.tokenize("the memory of a model is silent, and the memory of a page is found")[:24]
        ways, _ = evidence_cost._ways(bare, lm, tmp_path / "store", prompt, EnergyMeter())
        counter = iter((5.0, 7.5))
        monkeypatch.setattr(evidence_cost, "gpu_joules", lambda device: next(counter))
        assert evidence_cost._turn(ways[ALONE], prompt, EnergyMeter()).gpu_joules == 2.5
        searched, lams = {}, {}
        for name, way in ways.items():
            done = way.lm.generate(prompt, temperature=0, max_tokens=8, drafts=0, neighbors=64, **way.options).result()
            searched[name] = {neighbor.store == CONTEXT for token in done.tokens for neighbor in token.neighbors}
            lams[name] = {token.lam for token in done.tokens}
    cache, store = True, False
    assert searched == {
        ALONE: set(), ONE_LAM: {store}, ADAPTIVE: {store}, CACHE: {cache}, BOTH: {store, cache}, PASSAGES: set(),
    }  # fmt: skip
    assert len(lams[ONE_LAM]) == 1
    assert len(lams[ADAPTIVE]) > 1


def test_the_command_measures_every_way(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_cost, "PROMPT_TOKENS", 24)
    monkeypatch.setattr(evidence_cost, "TOKENS", 13)
    monkeypatch.setattr(evidence_cost, "ROOM", 12)
    monkeypatch.setattr(evidence_passages, "ROOM", 12)
    for name, count, first in (("stored", 14, 0), ("held-out", 14, 100)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.txt").write_text(f"{make_text(first + number, 30)} " * 3, encoding="utf-8")
    words = ["evidence", f"tiny={tmp_path / 'stored'},{tmp_path / 'held-out'}", "--model", str(model_folder)]
    sizes = ["--entries", "600", "--documents", "8", "--document-tokens", "60", "--only", "cost"]
    refused = CliRunner().invoke(app, [*words, *sizes])
    assert "the model's context has 48 tokens; expected 49 or more" in str(refused.exception)
    monkeypatch.setattr(evidence_cost, "TOKENS", 12)
    done = CliRunner().invoke(app, [*words, *sizes, "--work", str(tmp_path / "work"), "--json"])
    assert done.exit_code == 0, done.output
    found = {result["metric"]: result["value"] for result in json.loads(done.stdout)["results"]}

    def of(figure: str, way: str) -> float:
        return float(found[f"{figure}[table=cost,text=tiny,way={way}]"])

    for way in ("alone", *WAYS, "passages"):
        assert of("tokens_per_s", way) > 0
        assert of("first_token_ms", way) > 0
    assert of("time_over_alone", "alone") == 1
    store = tmp_path / "work/tiny/store"
    assert of("disk_bytes", "one_lam") == of("disk_bytes", "both") == disk_bytes(store, DERIVED)
    assert of("disk_bytes", "alone") == of("disk_bytes", "context_cache") == 0
    keys = sum(file.stat().st_size for name in FOR_KEYS for file in store.rglob(name))
    assert of("disk_bytes", "passages") == disk_bytes(store) - keys
