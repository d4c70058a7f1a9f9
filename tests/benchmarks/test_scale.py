"""`benchmarks scale`: laws through the whole bench, rotated copies, the folder of indexes, and the command."""

import itertools
import json
import shutil

import numpy as np
import pytest
from reports import figures_of
from typer.testing import CliRunner

from benchmarks.commands import app
from benchmarks.scale.command import numbers_in
from benchmarks.scale.sizes import Laws, Machine, Plan, _rows, bench_scale, default_kinds
from benchmarks.scale.store import BATCHES, Built, rotated_copies, scaled_keys
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.index.ivf import lists_for, resolve_index
from memlm.model.files.checkpoint import load_checkpoint

SIZES = (100_000, 300_000, 1_000_000, 10_000_000)
CACHE = 32 << 20
SEARCH = np.array([2e-5, 3e-7, 1e-10, 5e-11, 2e-11])
KINDS = ("IVF*,SQfp16", "IVF*,PQ4x4")


def made_up(entries):
    """An index whose costs follow the laws to the byte, and the times of its searches."""
    masses = {nprobe: 1 - 0.2 / nprobe for nprobe in (4, 8, 16, 32, 64, 128, 256)}
    lists = lists_for(entries)
    size, build_s = 136 * entries + 264 * lists + 66_000, 16 + 2e-6 * entries + 1e-12 * entries * lists * 64
    built = Built(entries, "IVF*,SQfp16", lists, 64, 128, size, build_s, masses)
    probed = {*masses, built.enough_lists(0.99)}
    times = {
        (batch, nprobe): [built.shape.search_terms(nprobe, CACHE) @ SEARCH / batch] * 3
        for batch, nprobe in itertools.product(BATCHES, probed)
    }
    return built, times


def test_costs_that_follow_the_laws_are_predicted_exactly(monkeypatch):
    monkeypatch.setattr("benchmarks.scale.sizes.cache_bytes", lambda: CACHE)
    built, times = zip(*map(made_up, SIZES), strict=True)
    plan = Plan(SIZES, predict=(10**8, 10**12), target=0.99, machine=Machine(64e9, 0.5))
    rows = list(_rows(built, times, plan))
    held_out, larger, divided = rows[3:]
    for name in ("bytes", "build_s", *(f"ms_per_query_batch{batch}" for batch in BATCHES), "nprobe"):
        assert held_out[f"{name}_off"] == pytest.approx(0, abs=1e-4), name
        assert f"{name}_off" not in rows[2]
    truth, times_8 = made_up(10**8)
    assert larger["bytes_predicted"] == pytest.approx(truth.bytes, rel=1e-4)
    assert larger["shards"] == 1
    assert larger["network_bytes_per_query"] == 0
    assert larger["ms_per_query_batch8_predicted"] == pytest.approx(1e3 * times_8[8, larger["nprobe"]][0], rel=1e-4)
    assert divided["shards"] == 2128  # 136 bytes an entry, and the centroids of 10^7 entries, in 64 GB
    assert divided["network_bytes_per_query"] == 2128 * (2 * 64 + 16 * 32)
    _, times_shard = made_up(round(10**12 / 2128))
    one_s = times_shard[1, divided["nprobe"]][0]
    assert divided["ms_per_query_batch1_predicted"] == pytest.approx(1e3 * one_s + 0.5, rel=1e-3)


def test_the_error_of_the_held_out_size_widens_larger_predictions(monkeypatch):
    monkeypatch.setattr("benchmarks.scale.sizes.cache_bytes", lambda: CACHE)
    built, times = map(list, zip(*map(made_up, SIZES), strict=True))
    built[-1] = Built(**{**vars(built[-1]), "bytes": built[-1].bytes * 10 // 8})
    rows = list(_rows(built, times, Plan(SIZES, predict=(10**8, 10**9), target=0.99)))
    assert rows[3]["bytes_off"] == pytest.approx(-0.2, abs=1e-4)
    low, high = ((row["bytes_predicted_most"] / row["bytes_predicted"] - 1) for row in rows[4:])
    assert low > 0.2  # the error of one step of ten times
    assert high > 0.4


def test_the_laws_learn_from_the_smaller_sizes_alone(monkeypatch):
    built, times = zip(*map(made_up, SIZES), strict=True)
    laws = Laws.fit(built[:2], times[:2], 0.99, CACHE)
    assert laws.query_s[1].freedom == 2 * len(times[0]) // len(BATCHES) - np.count_nonzero(
        laws.query_s[1].coefficients_P
    )


def test_a_rotated_copy_keeps_distances_and_the_mean():
    keys_ND = (np.random.default_rng(0).normal(size=(80, 16)) + 3).astype(np.float16)
    real, first, second = itertools.islice(rotated_copies(keys_ND), 3)
    assert np.array_equal(real, keys_ND)
    apart = np.linalg.norm(real[:, None].astype(float) - real[None].astype(float), axis=-1)
    for copy in (first, second):
        assert copy.dtype == np.float16
        assert copy.astype(float).mean(axis=0) == pytest.approx(keys_ND.astype(float).mean(axis=0), abs=0.01)
        turned = np.linalg.norm(copy[:, None].astype(float) - copy[None].astype(float), axis=-1)
        assert turned == pytest.approx(apart, abs=0.02)
        assert np.abs(copy.astype(float) - real.astype(float)).mean() > 0.3
    assert np.abs(first.astype(float) - second.astype(float)).mean() > 0.3


def test_the_number_of_lists_is_between_those_tried():
    built = Built(100, "IVF*,SQ8", 20, 4, 4, 1, 1.0, {4: 0.4, 8: 0.6, 16: 0.8})
    assert built.enough_lists(1.0) == 16
    assert built.enough_lists(0.75) == 8  # of the 0.8 that can be found
    assert 8 < built.enough_lists(0.9) < 16
    assert built.enough_lists(0.1) == 4
    assert built.mass(8) == pytest.approx(0.6)


def test_sizes_are_measured_and_kept(model_folder, corpus_folder, tmp_path):
    texts, held_out = Corpus([corpus_folder]), Corpus([corpus_folder / "doc-1.txt"])
    plan = Plan((300, 1000, 2000, 6000), KINDS, predict=(60_000,), repeats=1)
    figures = bench_scale(model_folder, texts, held_out, tmp_path, plan)
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.faiss")}
    assert len(kept) == 8
    assert 0 < figures["real_keys"] < 6000
    rows = figures["rows"]
    assert [(row["index"], row["entries"]) for row in rows] == [
        (kind, size) for kind in KINDS for size in (*plan.sizes, 60_000)
    ]
    for largest, predicted in (rows[3:5], rows[8:10]):
        assert abs(largest["bytes_off"]) < 0.02
        assert largest["bytes"] == (tmp_path / f"6000-{largest['index'].replace('*,', '-')}.faiss").stat().st_size
        assert largest["ms_per_query_batch64"] > 0
        assert predicted["bytes_predicted"] > 5 * largest["bytes"]
        assert predicted["bytes_predicted_least"] <= predicted["bytes_predicted"] <= predicted["bytes_predicted_most"]
    again = bench_scale(model_folder, texts, held_out, tmp_path, plan)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.faiss")} == kept
    assert again["rows"][0]["build_s"] == rows[0]["build_s"]


def test_entries_beyond_the_texts_are_rotated_copies(model_folder, corpus_folder, tmp_path):
    checkpoint, texts = load_checkpoint(model_folder), Corpus([corpus_folder / "doc-1.txt"])
    keys_ND, values_N, real = scaled_keys(checkpoint, texts, tmp_path, 1000, lambda *args: None)
    assert (len(keys_ND), len(values_N)) == (1000, 1000)
    assert np.array_equal(values_N[real : 2 * real], values_N[:real][: 1000 - real])
    assert not np.allclose(keys_ND[real : real + 9], keys_ND[:9], atol=0.01)
    more_ND, _, _ = scaled_keys(checkpoint, texts, tmp_path, 2000, lambda *args: None)
    assert np.array_equal(more_ND[:1000], keys_ND)
    fewer_ND, _, known = scaled_keys(checkpoint, texts, tmp_path, real - 1, lambda *args: None)
    assert (len(fewer_ND), known) == (real - 1, real - 1)


def test_indexes_of_other_keys_are_refused(model_folder, corpus_folder, tmp_path):
    texts, plan = Corpus([corpus_folder]), Plan((300, 1000), KINDS[:1], repeats=1)
    bench_scale(model_folder, texts, texts, tmp_path, plan)
    facts = tmp_path / "300-IVF-SQfp16.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "dim": 7}))
    with pytest.raises(InvalidInput, match="work has indexes of keys of 7 numbers"):
        bench_scale(model_folder, texts, texts, tmp_path, plan)


def test_a_folder_of_other_texts_or_another_model_is_refused(model_folder, corpus_folder, tmp_path):
    checkpoint, plan = load_checkpoint(model_folder), Plan((300, 1000), KINDS[:1], repeats=1)
    texts, others = Corpus([corpus_folder]), Corpus([corpus_folder / "doc-1.txt"])
    work = tmp_path / "work"
    bench_scale(checkpoint, texts, others, work, plan)
    kept = {path.name: path.read_bytes() for path in work.iterdir()}
    with pytest.raises(InvalidInput, match="work has keys of other texts"):
        bench_scale(checkpoint, others, texts, work, plan)
    another = load_checkpoint(copied(model_folder, tmp_path / "model"))
    with pytest.raises(InvalidInput, match="work has keys of another model"):
        bench_scale(another, texts, others, work, plan)
    with pytest.raises(InvalidInput, match="work has keys of another number type"):
        bench_scale(load_checkpoint(model_folder, dtype="bfloat16"), texts, others, work, plan)
    assert {path.name: path.read_bytes() for path in work.iterdir()} == kept


def copied(model_folder, to):
    """A copy of a model with another configuration file, and so another fingerprint."""
    shutil.copytree(model_folder, to)
    config = to / "config.json"
    config.write_text(config.read_text() + "\n")
    return to


def test_texts_that_ended_are_not_read_again(model_folder, corpus_folder, tmp_path):
    checkpoint, texts = load_checkpoint(model_folder), Corpus([corpus_folder / "doc-1.txt"])
    first_ND, first_N, real = scaled_keys(checkpoint, texts, tmp_path, 1000, lambda *args: None)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again_ND, again_N, _ = scaled_keys(checkpoint, texts, tmp_path, 1000, lambda *args: None)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert real < 1000
    assert np.array_equal(first_ND, again_ND)
    assert np.array_equal(first_N, again_N)


def test_a_run_that_was_interrupted_leaves_no_part_for_the_whole(model_folder, corpus_folder, tmp_path):
    checkpoint, texts = load_checkpoint(model_folder), Corpus([corpus_folder])

    def interrupted(stage, *counts):
        if stage == "compute keys":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scaled_keys(checkpoint, texts, tmp_path / "work", 6000, interrupted)
    keys_ND, _, real = scaled_keys(checkpoint, texts, tmp_path / "work", 6000, lambda *args: None)
    whole_ND, _, known = scaled_keys(checkpoint, texts, tmp_path / "whole", 6000, lambda *args: None)
    assert real == known
    assert np.array_equal(keys_ND, whole_ND)


def test_a_machine_too_small_for_an_entry_is_refused_before_keys_are_computed(model_folder, corpus_folder, tmp_path):
    plan = Plan((300, 1000), KINDS[:1], predict=(10**6,), machine=Machine(20))
    with pytest.raises(InvalidInput, match="shard_ram is 20 bytes"):
        bench_scale(model_folder, Corpus([corpus_folder]), Corpus([corpus_folder]), tmp_path / "work", plan)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        (Plan(()), "entries is empty"),
        (Plan((1000,)), "two ascending sizes"),
        (Plan((1000, 1000)), "two ascending sizes"),
        (Plan((0, 1000)), "two ascending sizes"),
        (Plan((10, 1000), target=0), "target is 0"),
        (Plan((10, 1000), target=1.1), "target is 1.1"),
        (Plan((10, 1000), predict=(0,)), "predict is 0"),
        (Plan((10, 1000), repeats=0), "repeats is 0"),
        (Plan((10, 1000), machine=Machine(0)), "shard_ram is 0"),
        (Plan((10, 1000), machine=Machine(hop_ms=-1)), "hop_ms is -1"),
    ],
)
def test_plans_that_cannot_be_carried_out_are_refused(plan, match):
    with pytest.raises(InvalidInput, match=match):
        plan.check()


def test_numbers_are_whole():
    assert numbers_in("100, 1e5,1e12,", "entries") == [100, 10**5, 10**12]
    for text in ("1.5", "many", "inf", "1e999", "nan"):
        with pytest.raises(InvalidInput, match="predict has"):
            numbers_in(text, "predict")


def test_the_default_kinds_can_be_built():
    for dim in (63, 64, 192):
        for kind in default_kinds(dim):
            resolve_index(kind.replace("*", "64"), 10**4, dim)


def test_the_command_shows_its_tables(model_folder, corpus_folder, tmp_path):
    command = ["scale", str(corpus_folder), "--held-out", str(corpus_folder / "doc-1.txt")]
    command += ["--model", str(model_folder), "--work", str(tmp_path), "--entries", "300,1000,3e3"]
    command += ["--index", KINDS[0], "--predict", "1e5,1e9", "--shard-ram", "1", "--repeats", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    for word in ("held out", "predicted", "rotated copies", "IVF*,SQfp16"):
        assert word in result.stdout
    printed = CliRunner().invoke(app, [*command, "--json", "--repeats", "2"]).stdout
    counts = {each["metric"].partition("[")[0]: each["n"] for each in json.loads(printed)["results"]}
    assert (counts["bytes"], counts["build_s"], counts["ms_per_query_batch8"]) == (1, 1, 2)
    assert counts["bytes_off"] is counts["ms_per_query_batch8_predicted"] is counts["network_bytes_per_query"] is None
    figures = figures_of(printed)
    assert figures["shards[entries=1000000000,index=IVF*,SQfp16]"] > 1
    assert figures["bytes_off[entries=3000,index=IVF*,SQfp16]"] == pytest.approx(0, abs=0.1)
    refused = CliRunner().invoke(app, [*command, "--entries", "300"])
    assert refused.exit_code == 1
    assert "two ascending sizes" in str(refused.exception)
