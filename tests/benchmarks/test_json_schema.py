import json

from benchmarks.json_schema import bench_suite


def test_cases_are_counted_by_their_outcome(tokenizer, tmp_path):
    tests = [{"data": 1, "valid": True}, {"data": "a", "valid": False}, {"data": 1.0, "valid": True}]
    cases = [{"schema": {"type": "integer"}, "tests": tests}, {"schema": {"not": {}}, "tests": tests[:1]}]
    (tmp_path / "type.json").write_text(json.dumps(cases))
    figures = bench_suite(tmp_path, tokenizer)
    assert figures["rows"] == [{"file": "type", "right": 2, "too narrow": 1, "refused": 1}]
    assert (figures["cases"], figures["right"]) == (4, 2)
    assert 0 < figures["mask_us"] <= figures["mask_us_99"]
