"""The best passages of a file of postings are those of BM25 over all passages, to the last bit."""

import io
from itertools import chain, pairwise

import numpy as np
import pytest

from memlm.errors import Corrupt
from memlm.index.store.derived import bm25 as bm25_module
from memlm.index.store.derived import postings as postings_module
from memlm.index.store.derived.bm25 import Query, Searched, bm25
from memlm.index.store.derived.postings import Postings, PostingsWriter, hash_of

WORDS = [f"w{number}" for number in range(60)]
COMMON = 1 / np.arange(1, len(WORDS) + 1) ** 1.1


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postings_module, "BLOCK_PASSAGES", 37)
    monkeypatch.setattr(bm25_module, "VIEW_PASSAGES", 120)


def drawn(random: np.random.Generator, num_passages: int) -> list[list[str]]:
    """Passages of words, some of which are common, and some passages without any."""
    lengths = random.integers(0, 40, num_passages) * (random.random(num_passages) < 0.95)
    return [random.choice(WORDS, length, p=COMMON / COMMON.sum()).tolist() for length in lengths]


def written(passages: list[list[str]]) -> Postings:
    file = io.BytesIO()
    writer = PostingsWriter(file)
    for terms in passages:
        writer.add(terms)
    writer.finish("these passages")
    return Postings(file.getvalue())


def counts_of(postings: Postings, term: str) -> list[int]:
    """How often a term stands in each passage."""
    counts = np.zeros(len(postings), np.int64)
    for block in postings.blocks:
        for row in block.look_up(np.array([hash_of(term)], np.uint64)):
            counts[block.first :][: block.num_passages] = block.counts_at(row, np.arange(block.num_passages))
    return counts.tolist()


def by_loops(passages: list[list[str]], question: list[list[str]], live_P: np.ndarray) -> np.ndarray:
    """The twin, over counts of lists of words."""
    lengths_P = np.array([len(terms) for terms in passages], np.int64)
    counts = (np.array([sum(map(terms.count, set(forms))) for terms in passages], np.int64) for forms in question)
    return bm25(counts, lengths_P, live_P)


def asked(random: np.random.Generator) -> list[list[str]]:
    """Words with some forms each, some of which stand nowhere. No form belongs to two words."""
    forms = random.permutation([*WORDS, "nowhere", "never"])[: random.integers(1, 14)].tolist()
    cuts = sorted({0, len(forms), *random.integers(0, len(forms), len(forms)).tolist()})
    return [forms[begin:end] for begin, end in pairwise(cuts)]


def mask(random: np.random.Generator, num_passages: int) -> np.ndarray | None:
    share = random.choice([0.0, 0.3, 0.9, 1.0])
    return None if random.random() < 0.3 else random.random(num_passages) < share


def whole(mask_P: np.ndarray | None, num_passages: int) -> np.ndarray:
    return np.ones(num_passages, bool) if mask_P is None else mask_P


@pytest.mark.parametrize("seed", range(40))
def test_the_best_passages_are_those_that_the_twin_ranks_first(seed):
    random = np.random.default_rng(seed)
    files = [drawn(random, num_passages) for num_passages in random.integers(0, 150, random.integers(1, 5)).tolist()]
    postings, passages = [written(some) for some in files], [*chain(*files)]
    for _ in range(5):
        question = asked(random)
        parts = [Searched(each, mask(random, len(each)), mask(random, len(each))) for each in postings]
        live_P = np.concatenate([whole(part.live_P, len(part.postings)) for part in parts])
        wanted_P = live_P & np.concatenate([whole(part.wanted_P, len(part.postings)) for part in parts])
        scores_P = by_loops(passages, question, live_P)
        order = np.lexsort((np.arange(len(scores_P)), -scores_P))
        order = order[wanted_P[order] & (scores_P[order] > 0)]
        for k in (1, 3, 10, 1000):
            numbers_K, scores_K = Query(parts, question).best(k)
            assert numbers_K.tolist() == order[:k].tolist()
            assert scores_K.tolist() == scores_P[order[:k]].tolist()
        some = random.permutation(len(passages))[:20]
        assert Query(parts, question).scores(some).tolist() == scores_P[some].tolist()


def test_two_forms_of_a_word_may_make_a_passage_the_best_where_each_alone_could_not(monkeypatch):
    monkeypatch.setattr(bm25_module, "VIEW_PASSAGES", 37)
    passages = [["a"], *[["a", "c"]] * 36, ["a", "b"], *[["b", "c"]] * 36]
    numbers_K, _ = Query([Searched(written(passages))], [["a", "b"]]).best(1)
    assert numbers_K.tolist() == [37]


def test_equal_passages_keep_their_order_across_blocks_and_files():
    same = [["a", "b"] if number % 3 else ["a"] for number in range(100)]
    parts = [Searched(written(same)), Searched(written(same))]
    numbers_K, scores_K = Query(parts, [["b"]]).best(100)
    assert numbers_K.tolist() == [number for number in range(200) if number % 100 % 3][:100]
    assert len(set(scores_K.tolist())) == 1


def test_most_blocks_are_not_scored_where_a_rare_word_decides(monkeypatch):
    passages = [["the", "of"] * 5 for _ in range(2000)]
    passages[999] = ["the", "xylophone"]
    part, scored = Searched(written(passages)), []
    add = bm25_module._View.add_to
    monkeypatch.setattr(bm25_module._View, "add_to", lambda view, *rest: (scored.append(view), add(view, *rest)))
    numbers_K, _ = Query([part], [["the"], ["of"], ["xylophone"]]).best(1)
    assert numbers_K.tolist() == [999]
    assert len(scored) == 1


def test_counts_of_every_size_are_kept():
    passages = [["a"] * 300 + ["b"], ["a", "c"], [], ["b"] * 255]
    postings = written(passages)
    assert [counts_of(postings, term) for term in "abcd"] == [
        [300, 1, 0, 0],
        [1, 0, 0, 255],
        [0, 1, 0, 0],
        [0, 0, 0, 0],
    ]
    assert postings.lengths_P.tolist() == [301, 2, 0, 255]


@pytest.mark.parametrize("most", [1, 10, 1000])
def test_a_block_ends_where_its_terms_would_take_too_much_ram(monkeypatch, most):
    passages = drawn(np.random.default_rng(0), 90)
    expected = Query([Searched(written(passages))], [["w1"], ["w7"]]).best(20)
    monkeypatch.setattr(postings_module, "BLOCK_TERMS", most)
    postings = written(passages)
    assert all(block.num_terms <= most or block.num_passages == 1 for block in postings.blocks)
    found = Query([Searched(postings)], [["w1"], ["w7"]]).best(20)
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


def test_without_passages_nothing_is_found():
    for passages in ([], [[]], [[], []]):
        postings = written(passages)
        assert len(postings) == len(passages)
        assert postings.identity == "these passages"
        assert not len(Query([Searched(postings)], [["a"]]).best(3)[0])
    assert not len(Query([], [["a"]]).best(3)[0])
    assert not len(Query([Searched(written([["a"]]))], []).best(3)[0])


def test_a_file_that_is_cut_off_or_changed_is_refused_or_raises(tmp_path):
    file = io.BytesIO()
    writer = PostingsWriter(file)
    for terms in drawn(np.random.default_rng(1), 100):
        writer.add(terms)
    writer.finish("x")
    content = file.getvalue()
    for end in (0, 5, len(content) // 2, len(content) - 1):
        with pytest.raises(ValueError, match=r"cut off|another kind"):
            Postings(content[:end])
    for place in (len(content) - 3, len(content) - 40):
        with pytest.raises(ValueError, match=r"changed|cut off|another"):
            Postings(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    messages = []
    for seed in range(60):  # within the blocks: an error or another result, and nothing worse
        random = np.random.default_rng(seed)
        begin = int(random.integers(0, len(content) - 2000))
        damaged = Postings(content[:begin] + random.bytes(500) + content[begin + 500 :], "passages.bin")
        try:
            Query([Searched(damaged)], [[word] for word in WORDS]).best(10)
        except Corrupt as error:
            messages.append(str(error))
    assert messages
    assert all("passages.bin is damaged" in message for message in messages)


def test_a_term_of_many_passages_has_a_count_for_each_and_a_rare_one_its_places():
    (block,) = written([["a", "b"] if number == 5 else ["a"] for number in range(30)]).blocks
    rows = block.look_up(np.array([hash_of(term) for term in "acb"], np.uint64))
    assert [row.term for row in rows] == [0, 2]
    (often, often_counts), (rarely, rare_counts) = map(block.postings, rows)
    assert (often, often_counts.tolist()) == (None, [1] * 30)
    assert (rarely.tolist(), rare_counts.tolist()) == ([5], [1])
