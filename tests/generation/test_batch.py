"""Generations that join and leave at any step: each draws what it draws alone, whoever stands beside it."""

import random

import pytest
import torch
from batch_helpers import KINDS, add, checkpoint_of, start
from running import alike

from memlm.api.params import GenerateRequest
from memlm.base.steps import run_steps
from memlm.errors import InternalError
from memlm.generation.batch import Batch
from memlm.generation.drive import stream
from memlm.generation.generation import Generation
from memlm.generation.step_search import RunningSequence
from memlm.language_model import LanguageModel
from memlm.model import forward
from memlm.model.files.checkpoint import Checkpoint
from memlm.model.state import pages
from memlm.model.state import pool as state_pool


@pytest.fixture(autouse=True)
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rooms are small at first, so that they grow in every test, and lie in pages of their own as large ones do.

    Rows are attended to in runs of similar lengths, however short they are.
    """
    monkeypatch.setattr(state_pool, "FIRST_PLACES", 4)
    monkeypatch.setattr(pages, "LAZY_BYTES", 1)
    monkeypatch.setattr(forward, "ALIKE_PLACES", 1)


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request, tokenizer, tmp_path_factory) -> Checkpoint:
    return checkpoint_of(request.param, tokenizer, tmp_path_factory.mktemp("kinds"))


def prompts(count: int) -> list[str]:
    rng = random.Random(5)
    words = ["the", "memory", "of", "a", "model", "can", "be", "read", "and", "edited", "while", "it", "serves"]
    beginnings = ["", "the memory of", "the memory of a model"]
    return [" ".join([rng.choice(beginnings), *rng.choices(words, k=rng.randint(0, 8))]).strip() for _ in range(count)]


def started(checkpoint: Checkpoint, prompt: str, seed: int) -> Generation:
    return run_steps(Generation.start(checkpoint, GenerateRequest.of(prompt, {"seed": seed, "max_tokens": 12}), None))


def alone(checkpoint: Checkpoint, prompt: str, seed: int) -> list:
    _, *tokens, _ = stream(checkpoint, started(checkpoint, prompt, seed))
    return [token for event in tokens for token in event]


@pytest.mark.parametrize("prefill_tokens", [3, 256])
def test_whoever_joins_and_leaves_each_draws_what_it_draws_alone(kind, prefill_tokens):
    rng, batch = random.Random(0), Batch(kind, max_sequences=6, prefill_tokens=prefill_tokens)
    waiting = list(enumerate(prompts(14)))
    tokens_seen: dict[int, list] = {}
    left: set[int] = set()
    sequences: dict[RunningSequence, int] = {}
    while waiting or len(batch):
        while waiting and len(batch) < 6 and rng.random() < 0.7:
            number, prompt = waiting.pop()
            sequences[add(batch, started(kind, prompt, number))], tokens_seen[number] = number, []
        for sequence in batch.step():
            assert sequence.failure is None
            tokens_seen[sequences[sequence]] += sequence.tokens
        if sequences and rng.random() < 0.1:
            sequence = rng.choice(list(sequences))
            if not sequence.is_done:
                left.add(sequences[sequence])
            batch.remove(sequence)
    assert left
    for number, prompt in enumerate(prompts(14)):
        expected = alone(kind, prompt, number)
        assert alike(tokens_seen[number], expected[: len(tokens_seen[number])])
        assert number in left or len(tokens_seen[number]) == len(expected)


def test_a_long_prompt_is_read_in_pieces_while_others_go_on(checkpoint):
    batch = Batch(checkpoint, max_sequences=4, prefill_tokens=4)
    short = add(batch, started(checkpoint, "a", 1))
    assert batch.step() == [short]
    long = add(batch, started(checkpoint, "the memory of a model can be read and edited", 2))
    size = len(long.generation.pending_ids)
    steps = 0
    while long not in (tokens_seen := batch.step()):
        assert tokens_seen == [short]
        steps += 1
    assert steps == (size - 1) // 4


def test_one_stream_of_a_small_model_takes_one_thread(checkpoint):
    """Drawing counts: a second thread that is woken for it alone spins until the next step, and is waited for."""
    threads, decoder = list[int](), checkpoint.decoder

    def seen(*_: object) -> None:
        threads.append(torch.get_num_threads())

    hooks = [module.register_forward_hook(seen) for module in (decoder, decoder.head)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        batch = Batch(checkpoint, max_sequences=4)
        add(batch, started(checkpoint, "a", 1))
        while len(batch):
            batch.step()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        for hook in hooks:
            hook.remove()
    assert len(threads) > 4
    assert set(threads) == {1}


@pytest.mark.parametrize("work", ["drafts.propose", "sample_draft"])
def test_one_that_fails_harms_no_other(checkpoint, monkeypatch, work):
    batch = Batch(checkpoint, max_sequences=4)
    good, bad = (add(batch, started(checkpoint, "the memory", seed)) for seed in (1, 2))
    batch.step()
    tokens_seen = list(good.tokens)

    def fail(*_: object) -> None:
        raise InternalError("broken")

    part, _, name = work.rpartition(".")
    monkeypatch.setattr(getattr(bad.generation, part) if part else bad.generation, name, fail)
    while len(batch):
        for sequence in batch.step():
            tokens_seen += sequence.tokens if sequence is good else ()
    assert isinstance(bad.failure, InternalError)
    assert alike(tokens_seen, alone(checkpoint, "the memory", 1))


def test_one_search_a_step_serves_all_that_ask_alike(lm: LanguageModel, monkeypatch):
    searches, store = [], lm.engine.stores.model_store()
    search = store.search_views

    def counted(views_Q, queries_QD, k, **options):
        searches.append((len(queries_QD), k))
        return search(views_Q, queries_QD, k, **options)

    monkeypatch.setattr(store, "search_views", counted)
    batch = Batch(lm.checkpoint, max_sequences=8)
    param_sets = [{"k": 4}, {"k": 4}, {"k": 9}, {"use_store": False}, {"k": 4, "lam": 0.0}]
    sequences = [add(batch, start(lm, GenerateRequest.of("the", {"seed": 1, **memory}))) for memory in param_sets]
    batch.step()
    assert sorted(searches) == [(1, 9), (2, 4)]
    assert sequences[3].tokens[0].knn_logprob is None
    assert sequences[0].tokens[0].knn_logprob is not None
    assert alike(sequences[0].tokens, lm.generate("the", seed=1, k=4, max_tokens=1))


def test_places_that_become_free_are_used_again(checkpoint):
    batch = Batch(checkpoint, max_sequences=3)
    for round_ in range(5):
        sequences = [add(batch, started(checkpoint, "a", seed)) for seed in range(3)]
        batch.step()
        for sequence in random.Random(round_).sample(sequences, 3):
            batch.remove(sequence)
            batch.remove(sequence)
        assert len(batch) == 0
    assert batch._pool.shape[0] == 3


def test_room_is_reserved_for_what_is_asked_and_given_up_when_nobody_is_there(checkpoint):
    batch, places = Batch(checkpoint, max_sequences=8), list[tuple[int, int]]()
    for prompt, count in (("a", 3), ("the memory", 20), ("a", 2), ("", 43)):
        add(
            batch,
            run_steps(Generation.start(checkpoint, GenerateRequest.of(prompt, {"seed": 1, "max_tokens": count}), None)),
        )
        batch.step()
        places.append(batch._pool.shape)
    first, second, *_ = (len(started(checkpoint, prompt, 1).pending_ids) for prompt in ("a", "the memory"))
    rooms = [max(4, first + 2)]
    rooms.append(max(second + 19, 2 * rooms[0]))
    assert places == [(1, rooms[0]), (2, rooms[1]), (4, rooms[1]), (4, min(48, 2 * rooms[1]))]
    batch.shrink()
    assert batch._pool.shape[0] == 4
    while len(batch):
        batch.step()
    batch.shrink()
    assert batch._pool.shape == (1, 4)
    sequence, tokens_seen = add(batch, started(checkpoint, "the", 3)), []
    while len(batch):
        batch.step()
        tokens_seen += sequence.tokens
    assert alike(tokens_seen, alone(checkpoint, "the", 3))


def test_a_store_that_fails_harms_only_those_that_ask_it(lm: LanguageModel, monkeypatch):
    batch = Batch(lm.checkpoint, max_sequences=4)
    asking = add(batch, start(lm, GenerateRequest.of("the", {"seed": 1, "max_tokens": 4})))
    alone_ = add(batch, start(lm, GenerateRequest.of("the", {"seed": 1, "max_tokens": 4, "use_store": False})))

    def fail(*_: object, **__: object) -> None:
        raise InternalError("the disk is gone")

    monkeypatch.setattr(lm.engine.stores.model_store(), "search_views", fail)
    tokens_seen = []
    while len(batch):
        for sequence in batch.step():
            tokens_seen += sequence.tokens if sequence is alone_ else ()
    assert isinstance(asking.failure, InternalError)
    monkeypatch.undo()
    assert alike(tokens_seen, lm.generate("the", seed=1, max_tokens=4, use_store=False))


def test_prompts_that_come_together_are_read_together(checkpoint):
    reads = []
    handle = checkpoint.decoder.register_forward_pre_hook(lambda decoder, inputs: reads.append(tuple(inputs[0].shape)))
    batch = Batch(checkpoint, max_sequences=8)
    texts = ["the", "the memory of a", "", "a model can be read", "the memory " * 9]
    sizes = [len(started(checkpoint, text, 0).pending_ids) for text in texts]
    try:
        for text in texts:
            add(batch, started(checkpoint, text, 0))
        assert len(batch.step()) == len(texts)
    finally:
        handle.remove()
    assert reads == [(4, max(sizes[:4])), (1, sizes[4])], "all that are about as long, and the long one by itself"
