"""Effects of parts: which runs count, and the command."""

import json

import pytest
from typer.testing import CliRunner

from memlm.bench import effect as kinds
from memlm.bench import effects
from memlm.bench.effect import Effect, Measurement
from memlm.bench.effects import EFFECTS, Job, bench_effects, chosen_effects
from memlm.bench.learning import config_for
from memlm.bench.tasks import OffsetCopy
from memlm.cli.app import app
from memlm.errors import InvalidInput

EASY = Effect(
    "easy", "it learns", OffsetCopy(symbols=4, length=3), {"blind": {"windows": (1, 1)}}, 75, 0.5,
    training={"learning_rate": 3e-2, "batch_size": 16},
)  # fmt: skip


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: effect.part)
def test_every_entry_makes_models(effect):
    assert effect.expects
    assert 0 < effect.minutes <= 4
    if isinstance(effect, Effect):
        assert {"plain", "plain again"} < {*effect.rows}
        for change in ({}, *effect.configs.values()):
            patch = {name: value for name, value in change.items() if name != "training"}
            config_for(effect.task, **{**effect.shape, **patch})


def test_each_part_has_one_entry():
    assert len({effect.part for effect in EFFECTS}) == len(EFFECTS)


def test_an_unknown_part_is_refused_with_the_known_ones():
    with pytest.raises(InvalidInput, match=r"'nothing' has no effect; .*patterns"):
        chosen_effects(["patterns", "nothing"])


def test_a_seed_counts_only_where_the_plain_config_learned():
    done = {
        Job("easy", row, seed): {row: {"accuracy": accuracy, "is_learned": float(seed > 0), "steps": 1.0}}
        for row, accuracy in (("plain", 0.9), ("blind", 0.2), ("plain again", 0.8))
        for seed in range(3)
    }
    done[Job("easy", "blind", 2)] = "ValueError: it broke"
    rows = effects._rows_of(EASY, done)
    assert [(row["config"], row["seeds"]) for row in rows] == [("plain", 2), ("blind", 1), ("plain again", 2)]
    assert [row["accuracy"] for row in rows] == [0.9, 0.2, 0.8]
    assert {row["chance"] for row in rows} == {0.25}


def test_a_measurement_needs_no_plain_config():
    found = Measurement("counted", "it grows", lambda seed: {"small": {"bytes": 1.0 + seed}}, 0.1)
    done = {Job("counted", "", seed): found.measure(seed) for seed in range(3)}
    (row,) = effects._rows_of(found, done)
    assert row == {
        "effect": "counted", "config": "small", "seeds": 3, "bytes": 2.0, "bytes_least": 1.0, "bytes_most": 3.0
    }  # fmt: skip


def test_a_run_has_its_own_seed_and_changes_of_the_training(monkeypatch):
    seen = []

    def learn(config, task, **options):
        seen.append((config.windows, options["seed"], options["training"]))
        raise InterruptedError

    monkeypatch.setattr(kinds, "learn", learn)
    configs = {"blind": {"windows": (1, 1), "training": {"batch_size": 2}}}
    effect = Effect("easy", "as it is", EASY.task, configs, 1, 1.0, training={"learning_rate": 0.5})
    for row in effect.rows:
        with pytest.raises(InterruptedError):
            effect.run(row, 1, "cpu")
    rate = {"learning_rate": 0.5}
    assert seen == [((), 1, rate), ((1, 1), 1, {**rate, "batch_size": 2}), ((), 4, rate)]


@pytest.fixture
def in_this_process(monkeypatch):
    """Runs jobs here, where the table of effects is that of the test."""
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(effects, "EFFECTS", (EASY,))
    monkeypatch.setattr(effects, "ProcessPoolExecutor", lambda jobs, *_: ThreadPoolExecutor(1))


def test_the_command_trains_each_config_and_reports_in_json(in_this_process, monkeypatch):
    monkeypatch.setattr(effects, "SEEDS", 1)
    result = CliRunner().invoke(app, ["bench", "variants", "--effects", "--only", "easy", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    values = {each["metric"]: each for each in report["results"]}
    plain = values["accuracy[effect=easy,config=plain]"]
    assert plain["value"] > 0.9
    assert plain["low"] <= plain["value"] <= plain["high"]
    assert values["accuracy[effect=easy,config=blind]"]["value"] < 0.6
    assert values["seeds[effect=easy,config=plain]"]["value"] == 1
    assert report["settings"]["expects"] == {"easy": "it learns"}


def test_a_figure_that_the_plain_config_lacks_is_printed(in_this_process, monkeypatch):
    figures = {"bits": 0.5, "is_learned": 1.0, "steps": 7.0}
    monkeypatch.setattr(
        effects, "run", lambda job, device: {job.row: {**figures, **({"load": 2.25} if job.row == "blind" else {})}}
    )
    printed = CliRunner().invoke(app, ["bench", "variants", "--effects"]).stdout
    assert "load" in printed
    assert printed.count("2.25 (2.25") == 1  # the rest may stand on the next line


@pytest.mark.parametrize("is_learned", [True, False])
def test_the_command_prints_each_config(in_this_process, monkeypatch, is_learned):
    figures = {"accuracy": 0.5, "is_learned": float(is_learned), "steps": 7.0}
    monkeypatch.setattr(effects, "run", lambda job, device: {job.row: figures})
    result = CliRunner().invoke(app, ["bench", "variants", "--effects"])
    assert result.exit_code == 0, result.output
    assert "blind" in result.stdout
    assert "expected: it learns" in result.stdout
    assert ("no result" in result.stdout) == (not is_learned)
    assert ("0.5 (0.5 to 0.5)" in result.stdout) == is_learned


def test_a_run_that_fails_leaves_the_others(in_this_process, monkeypatch):
    def run(job, device):
        if job.row == "blind":
            raise ValueError("it broke")
        return {job.row: {"accuracy": 1.0, "is_learned": 1.0, "steps": 1.0}}

    monkeypatch.setattr(effects, "run", run)
    figures = bench_effects((), jobs=1, device="cpu", progress=lambda *_: None)
    assert {row["config"] for row in figures["rows"]} == {"plain", "plain again"}
    assert figures["errors"]["easy blind 0"] == "ValueError: it broke"
    assert not figures["no_result"]


def test_an_effect_whose_plain_runs_crash_says_so(in_this_process, monkeypatch):
    def crash(job, device):
        raise MemoryError("no room")

    monkeypatch.setattr(effects, "run", crash)
    result = CliRunner().invoke(app, ["bench", "variants", "--effects"])
    assert "no result: each run of the plain decoder crashed (MemoryError: no room)" in result.stdout
    assert "did not learn" not in result.stdout

    def crash_once(job, device):
        if job.seed == 1:
            raise MemoryError("no room")
        return {job.row: {"accuracy": 0.1, "is_learned": 0.0, "steps": 1.0}}

    monkeypatch.setattr(effects, "run", crash_once)
    assert "did not learn" in CliRunner().invoke(app, ["bench", "variants", "--effects"]).stdout
    counted = Measurement("counted", "it grows", lambda seed: {}, 0.1)
    done = {Job("counted", "", seed): "ValueError: it broke" for seed in range(3)}
    assert effects._crash_of(counted, done) == "each run crashed (ValueError: it broke)"


@pytest.mark.parametrize(
    ("options", "named"), [(["--effects", "--minutes", "1"], "minutes"), (["--jobs", "2"], "jobs")]
)
def test_an_option_without_effect_is_refused(options, named):
    result = CliRunner().invoke(app, ["bench", "variants", *options])
    assert isinstance(result.exception, InvalidInput)
    assert result.exception.field == named


def test_jobs_run_in_processes_of_their_own_that_know_the_table():
    with effects.ProcessPoolExecutor(1, effects.get_context("spawn")) as pool:
        error = pool.submit(effects.run, Job("patterns", "plain", 0), "nowhere").exception()
    assert isinstance(error, InvalidInput)
    assert "device is 'nowhere'" in str(error)
