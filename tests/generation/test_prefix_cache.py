"""A prompt that begins like an earlier text of its caller is read from where they part, and gives the same answer."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from batch_helpers import GREEDY, HISTORY, KINDS, NumRead, add, checkpoint_of, keep, length_found, started, state_of
from chats import PLAIN, PLAIN_TOKENS, give_template
from conftest import SHAPE
from random_adapters import SPECS, save_random_adapter
from running import alike

from memlm.api.generation import Token
from memlm.api.passages import Passage
from memlm.data.corpus import Corpus
from memlm.generation import prefix_cache
from memlm.generation.batch import Batch
from memlm.generation.drive import stream
from memlm.generation.generation import Generation
from memlm.generation.prefix_cache import PrefixCache
from memlm.indexing.build import build_index
from memlm.language_model import load
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from memlm.retrieval.own_past import ContextSettings


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request, tokenizer, tmp_path_factory) -> Checkpoint:
    return checkpoint_of(request.param, tokenizer, tmp_path_factory.mktemp("kinds"))


@pytest.fixture(scope="module")
def roomy(tokenizer, tmp_path_factory) -> Path:
    """A model with a chat template and room for a passage."""
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("roomy") / "model"
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **{**SHAPE, "context_length": 256})
    save_checkpoint(folder, Decoder(config), tokenizer)
    give_template(folder, PLAIN, PLAIN_TOKENS)
    return folder


def drawn(checkpoint: Checkpoint, generation: Generation, prefixes: PrefixCache | None = None) -> list[Token]:
    _, *tokens, _ = stream(checkpoint, generation, prefixes)
    return [token for event in tokens for token in event]


def texts(count: int) -> list[list[int]]:
    """Prompts of 3 to 40 tokens that share beginnings of all lengths, also whole ones."""
    rng, known = random.Random(7), [HISTORY[:30]]
    for _ in range(count):
        start = rng.choice(known)
        known.append([*start[: rng.randint(2, len(start))], *rng.choices(range(20, 90), k=rng.randint(1, 10))][:40])
    return known


@pytest.mark.parametrize("prefill_tokens", [5, 256])
def test_every_prompt_draws_what_it_draws_without_the_texts_before(kind, monkeypatch, prefill_tokens):
    monkeypatch.setattr(prefix_cache, "LEAST_TOKENS", 3)
    prefixes = PrefixCache(kind.decoder)
    batch = Batch(kind, max_sequences=4, prefill_tokens=prefill_tokens, prefixes=prefixes)
    rng, waiting, sequences, found = random.Random(1), list(enumerate(texts(24))), {}, dict[int, list[Token]]()
    while waiting or len(batch):
        while waiting and len(batch) < 4 and rng.random() < 0.6:
            number, ids = waiting.pop(0)
            sequences[add(batch, started(kind, ids))], found[number] = number, []
        for sequence in batch.step():
            assert sequence.failure is None
            found[sequences[sequence]] += sequence.tokens
    for number, ids in enumerate(texts(24)):
        assert alike(found[number], drawn(kind, started(kind, ids)))
    assert sum(sequence.generation.usage.cached_tokens for sequence in sequences) > 0
    assert 0 < prefixes.num_bytes <= prefixes.max_bytes


def test_only_what_a_turn_adds_is_read(checkpoint):
    prefixes, history = PrefixCache(checkpoint.decoder), HISTORY[:32]
    for turn in range(3):
        generation = started(checkpoint, history, max_tokens=2)
        with NumRead(checkpoint.decoder) as read:
            tokens = drawn(checkpoint, generation, prefixes)
        assert generation.usage.cached_tokens == (len(history) - 3 if turn else 0)
        assert read.count == (3 if turn else len(history)) + 1  # and the first token that was drawn
        history = [*history, *(token.id for token in tokens), 20 + turn, 30 + turn]


def test_the_same_prompt_again_is_read_from_its_last_token(checkpoint):
    prefixes = PrefixCache(checkpoint.decoder)
    first = drawn(checkpoint, started(checkpoint, HISTORY), prefixes)
    with NumRead(checkpoint.decoder) as read:
        assert alike(drawn(checkpoint, started(checkpoint, HISTORY), prefixes), first)
    assert read.count == 3
    assert len(prefixes) == 1


def test_no_other_caller_is_served_sooner(checkpoint):
    """Neither the usage nor the work of a request shows what another caller has asked."""
    prefixes = PrefixCache(checkpoint.decoder)
    with NumRead(checkpoint.decoder) as cold:
        drawn(checkpoint, started(checkpoint, HISTORY, caller="a"), prefixes)
    other = started(checkpoint, HISTORY, caller="b")
    with NumRead(checkpoint.decoder) as read:
        drawn(checkpoint, other, prefixes)
    assert (read.count, other.usage.cached_tokens) == (cold.count, 0)
    assert len(prefixes) == 2


def test_prompts_of_two_callers_that_are_read_at_a_time_do_not_wait_for_each_other(checkpoint):
    batch = Batch(checkpoint, max_sequences=4, prefixes=PrefixCache(checkpoint.decoder))
    sequences = [add(batch, started(checkpoint, HISTORY, caller=caller)) for caller in "ab"]
    with NumRead(checkpoint.decoder) as read:
        assert batch.step() == sequences
    assert read.count == 2 * len(HISTORY)


def test_a_beginning_that_several_prompts_share_is_read_once(checkpoint):
    prefixes = PrefixCache(checkpoint.decoder)
    batch, ends = Batch(checkpoint, max_sequences=8, prefixes=prefixes), [[61], [62, 63], [61], [64]]
    sequences = [add(batch, started(checkpoint, [*HISTORY, *end])) for end in ends]
    with NumRead(checkpoint.decoder) as read:
        assert batch.step() == sequences
    assert read.count == len(HISTORY) + sum(map(len, ends))
    assert [each.generation.usage.cached_tokens for each in sequences] == [0, *[len(HISTORY)] * 3]
    for sequence, end in zip(sequences, ends, strict=True):
        assert alike(sequence.tokens, drawn(checkpoint, started(checkpoint, [*HISTORY, *end]))[:1])


def test_one_that_leaves_before_its_end_is_not_kept(checkpoint):
    prefixes = PrefixCache(checkpoint.decoder)
    batch = Batch(checkpoint, max_sequences=4, prefixes=prefixes)
    sequence = add(batch, started(checkpoint, HISTORY))
    batch.step()
    batch.remove(sequence)
    assert len(prefixes) == prefixes.num_bytes == 0


def test_the_caller_with_the_most_bytes_makes_room_with_the_text_used_the_longest_ago(checkpoint):
    size = state_of(checkpoint, HISTORY).num_bytes + 4 * len(HISTORY)
    prefixes = PrefixCache(checkpoint.decoder, 3 * size)
    mine, others = [10, *HISTORY[1:]], [[number, *HISTORY[1:]] for number in range(11, 15)]
    keep(prefixes, checkpoint, mine, "quiet")
    for ids in others[:2]:
        keep(prefixes, checkpoint, ids, "loud")
    assert length_found(prefixes, others[0], "loud") == len(HISTORY)  # used now, so the other one goes
    for ids in others[2:]:
        keep(prefixes, checkpoint, ids, "loud")
        assert prefixes.num_bytes == 3 * size
    assert length_found(prefixes, mine, "quiet") == len(HISTORY)
    assert [length_found(prefixes, ids, "loud") for ids in others] == [0, 0, 40, 40]


def test_a_text_goes_for_one_that_begins_with_it_and_one_that_is_known_is_not_kept_again(checkpoint):
    prefixes = PrefixCache(checkpoint.decoder)
    keep(prefixes, checkpoint, HISTORY[:32])
    keep(prefixes, checkpoint, HISTORY)
    assert (len(prefixes), length_found(prefixes, HISTORY)) == (1, 40)
    before = prefixes.num_bytes
    keep(prefixes, checkpoint, HISTORY[:35])
    keep(prefixes, checkpoint, HISTORY[:31])  # too short to save time
    assert (len(prefixes), prefixes.num_bytes, length_found(prefixes, HISTORY)) == (1, before, 40)
    other = [*HISTORY[:32], *range(70, 86)]
    keep(prefixes, checkpoint, other)
    assert (length_found(prefixes, other), length_found(prefixes, HISTORY)) == (48, 40)


def test_there_is_a_largest_number_of_texts(checkpoint, monkeypatch):
    monkeypatch.setattr(prefix_cache, "MAX_TEXTS", 3)
    prefixes = PrefixCache(checkpoint.decoder)
    for number in range(5):
        keep(prefixes, checkpoint, [number, *HISTORY[1:]])
    assert len(prefixes) == 3
    assert [length_found(prefixes, [number, *HISTORY[1:]]) for number in range(5)] == [0, 0, 40, 40, 40]


@pytest.mark.parametrize("max_bytes", [0, 100])
def test_without_room_nothing_is_kept(checkpoint, max_bytes):
    prefixes = PrefixCache(checkpoint.decoder, max_bytes)
    for _ in range(2):
        generation = started(checkpoint, HISTORY)
        drawn(checkpoint, generation, prefixes)
        assert generation.usage.cached_tokens == len(prefixes) == prefixes.num_bytes == 0


def test_a_chat_is_answered_as_by_a_model_that_keeps_nothing(roomy):
    with load(roomy) as model, load(roomy) as cold:
        cold.engine.prefixes.max_bytes = 0
        messages = [{"role": "user", "content": "the memory of a model can be read and edited while it serves"}]
        for turn in range(2):
            answers = [each.chat(messages, temperature=0, max_tokens=4).result() for each in (model, cold)]
            assert alike(answers[0].tokens, answers[1].tokens)
            cached, nothing = (answer.finished.usage.cached_tokens for answer in answers)
            assert (cached > prefix_cache.LEAST_TOKENS) == bool(turn)
            assert nothing == 0
            messages += [{"role": "assistant", "content": answers[0].text}, {"role": "user", "content": "a"}]


@pytest.mark.parametrize("first", [None, "lora"])
def test_a_text_goes_on_from_none_that_another_adapter_read(model_folder, tmp_path, first):
    folder = save_random_adapter(tmp_path / "lora", load_checkpoint(model_folder), SPECS["lora"])
    second = None if first else "lora"
    with load(model_folder, adapters={"lora": folder}) as model, load(model_folder, adapters={"lora": folder}) as cold:
        model.generate(HISTORY, adapter=first, **GREEDY).result()
        found = model.generate(HISTORY, adapter=second, **GREEDY).result()
        assert found.finished.usage.cached_tokens == 0
        assert alike(found.tokens, cold.generate(HISTORY, adapter=second, **GREEDY).result().tokens)
        again = model.generate(HISTORY, adapter=second, **GREEDY).result()
        assert again.finished.usage.cached_tokens == len(HISTORY) - 1
        assert alike(found.tokens, again.tokens)


def test_a_text_has_the_past_of_its_beginning(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "tuned")
    ContextSettings(k=4, temperature=20.0, lam=0.4).save(tmp_path / "tuned")
    prompts = [HISTORY, [*HISTORY, *HISTORY[:5]], [*HISTORY[:35], 70, *HISTORY[:4]]]
    with load(tmp_path / "tuned") as model:
        model.generate(HISTORY, context_cache=0, **GREEDY).result()  # has no past
        for number, prompt in enumerate(prompts):
            options = {**GREEDY, "neighbors": 4, "loop_guard": False}
            found = model.generate(prompt, **options).result()
            assert (found.finished.usage.cached_tokens > 0) == (number > 0)
            with load(tmp_path / "tuned") as cold:
                expected = cold.generate(prompt, **options).result().tokens
            assert alike(found.tokens, expected)
            for token, other in zip(found.tokens, expected, strict=True):
                assert [each.token_offset for each in token.neighbors] == [
                    each.token_offset for each in other.neighbors
                ]


def test_a_deletion_leaves_no_state_of_any_text(model_folder, corpus_folder, tmp_path):
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "store", check="none")
    with load(model_folder, [tmp_path / "store"]) as model:
        model.generate(HISTORY, **GREEDY).result()
        assert model.engine.prefixes.num_bytes
        document = model.find_passages("the memory of a model", k=1)[0].document_id
        model.delete_documents([document])
        assert len(model.engine.prefixes) == model.engine.prefixes.num_bytes == 0


def test_a_text_that_began_before_a_deletion_is_not_kept_after_it(model_folder, corpus_folder, tmp_path):
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "store", check="none")
    with load(model_folder, [tmp_path / "store"]) as model:
        tokens = model.generate(HISTORY, **GREEDY)
        next(tokens)
        model.delete_documents([model.find_passages("the memory of a model", k=1)[0].document_id])
        tokens.result()
        assert len(model.engine.prefixes) == 0
        model.generate(HISTORY, **GREEDY).result()
        assert len(model.engine.prefixes) == 1


@pytest.mark.parametrize("mixture", [False, True])
def test_a_passage_is_read_once_for_several_questions(roomy, mixture):
    texts = ["the memory of a model can be read and edited while it serves"] * 2
    passages = [Passage("", str(n), f"page {n}", 0, 30, text, 1.0) for n, text in enumerate(texts[: 1 + mixture])]
    with load(roomy) as model, NumRead(model.checkpoint.decoder) as read:
        counts = []
        for question in ("is it a page", "can it be read"):
            before = read.count
            model.answer(question, passages, mixture=mixture, temperature=0, max_tokens=3)
            counts.append(read.count - before)
    assert counts[1] < counts[0] / 2
