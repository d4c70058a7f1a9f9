"""The report of a bench describes itself: command, commit, date, versions, machine, settings, results."""

from memlm.bench.report import report, results


def test_spreads_and_errors_become_bounds():
    figures = {"ratio": 1.5, "ratio_least": 1.0, "ratio_most": 2.0, "nats": 3.0, "nats_error": 0.5, "k": 8}
    assert list(results(figures, 5)) == [
        {"metric": "ratio", "value": 1.5, "low": 1.0, "high": 2.0, "n": 5},
        {"metric": "nats", "value": 3.0, "low": 2.5, "high": 3.5, "n": 5},
    ]


def test_rows_carry_their_words():
    figures = {"rows": [{"entries": 10, "index": "Flat", "nprobe": 4, "lists": "IVF8", "recall": 1.0}]}
    metrics = [result["metric"] for result in results(figures, None)]
    assert metrics == ["nprobe[entries=10,index=Flat]", "recall[entries=10,index=Flat]"]


def test_a_report_names_its_origin(monkeypatch):
    monkeypatch.setattr("sys.argv", ["memlm", "bench", "build", "docs"])
    made = report({"open_s": 0.5, "index": "Flat", "entries": 3}, repeats=2)
    assert made["command"] == "memlm bench build docs"
    assert made["settings"] == {"index": "Flat", "entries": 3}
    assert {"memlm", "python", "torch"} <= made["versions"].keys()
    assert made["machine"]["cores"] >= 1
    assert made["machine"]["gigabytes_per_s"] > 0
    assert made["machine"]["gigaflops_float32"] > 0
