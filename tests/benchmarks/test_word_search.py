"""What `python -m benchmarks words` compares."""

from reports import figures_of
from texts import make_text
from typer.testing import CliRunner

from benchmarks import word_search
from benchmarks.commands import app


def test_ways_index_the_same_text_and_answer_every_question(tmp_path):
    (tmp_path / "text.txt").write_text(make_text(0, 3000))
    (tmp_path / "questions.txt").write_text("What is a memory?\nthe page\nzebra\n")
    options = ["words", str(tmp_path / "text.txt"), "--questions", str(tmp_path / "questions.txt"), "--copies", "2"]
    result = CliRunner().invoke(app, [*options, "--slow", "2", "--json"])
    assert result.exit_code == 0, result.output
    figures = figures_of(result.stdout)
    for way, questions in (("memlm", 3), ("memlm with one in ten deleted", 3), ("SQLite FTS5", 2)):
        assert figures[f"questions[way={way}]"] == questions
        assert figures[f"passages[way={way}]"] == figures["passages[way=memlm]"] > 10
        assert all(figures[f"{figure}[way={way}]"] > 0 for figure in ("megabytes", "build_s", "share", "p50_ms"))


def test_repeated_passages_keep_their_common_words():
    repeated = [*word_search._repeated(["the rare word", "the end"], {"the"}, 3)]
    assert repeated == ["the rare word", "the end", "the rare1 word1", "the end1", "the rare2 word2", "the end2"]
