"""Earlier texts are kept within bounds, harm no request, and leave with the documents they may hold."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from batch_helpers import GREEDY, HISTORY, NumRead, add, keep, length_found, started
from decoders import SHAPE

from memlm.data.corpus import Corpus
from memlm.generation.batch import Batch
from memlm.generation.prefix_cache import PrefixCache, Scope
from memlm.indexing.build import build_index
from memlm.language_model import load
from memlm.model import Decoder, DecoderState
from memlm.model.files.checkpoint import Checkpoint

SHAPES = {
    "plain": replace(SHAPE, context_length=400),
    "windows": replace(SHAPE, context_length=400, windows=(16, 16)),
    "xl": replace(SHAPE, context_length=16, xl_length=16),
}
IDS = [*range(3, 39), 1, 1, 1, 1]


def state_of(decoder: Decoder, ids: Sequence[int]) -> DecoderState:
    found = decoder.new_state(capacity=len(ids))
    with torch.inference_mode():
        decoder(torch.tensor([ids]), found)
    return found


def keep_for(prefixes: PrefixCache, decoder: Decoder, caller: str, ids: Sequence[int], count: int | None = None) -> int:
    return prefixes.keep(Scope(caller, 0), np.array(ids[:count], np.int32), state_of(decoder, ids), 0)


def known(prefixes: PrefixCache, caller: str, ids: Sequence[int]) -> int:
    found = prefixes.find(Scope(caller, 0), np.array(ids, np.int32))
    return 0 if found is None else found.length


def test_choices_read_their_prompt_once_behind_a_beginning_that_is_known(checkpoint, monkeypatch) -> None:
    """As the second turn of a chat with several choices: its new tokens are read once."""
    monkeypatch.setattr("memlm.generation.prefix_cache.LEAST_TOKENS", 4)
    monkeypatch.setattr("memlm.generation.prefill.LEAST_TOKENS", 4)
    prefixes = PrefixCache(checkpoint.decoder)
    keep(prefixes, checkpoint, HISTORY[:32])
    batch = Batch(checkpoint, max_sequences=4, prefixes=prefixes)
    for _ in range(4):
        add(batch, started(checkpoint, [*HISTORY[:32], *range(60, 68)]))
    with NumRead(checkpoint.decoder) as read:
        batch.step()
    assert read.count == 8 + 3


@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_two_chats_with_one_system_prompt_read_their_new_turns_alone(kind: str) -> None:
    decoder = Decoder(SHAPES[kind]).eval()
    prefixes, system = PrefixCache(decoder), [3 + number % 30 for number in range(160)]
    chats, lengths = [[*system, *[39 - number] * 40] for number in range(2)], list[int]()
    for turn in range(2):
        for number, ids in enumerate(chats):
            lengths.append(known(prefixes, "", ids))
            keep_for(prefixes, decoder, "", ids)
            chats[number] = [*ids, *[5 + turn] * 4]
    assert lengths[2:] == [200, 200]


def test_a_large_text_of_one_caller_leaves_those_of_others() -> None:
    decoder = Decoder(SHAPES["plain"]).eval()
    size = keep_for(PrefixCache(decoder), decoder, "a", IDS)
    prefixes = PrefixCache(decoder, 4 * size)
    for caller in "abc":
        keep_for(prefixes, decoder, caller, IDS)
    assert keep_for(prefixes, decoder, "loud", [2, *IDS, *IDS, *IDS, *IDS][:155]) == 0
    assert all(known(prefixes, caller, IDS) for caller in "abc")
    assert prefixes.num_bytes == 3 * size


def test_nothing_goes_for_a_text_that_cannot_be_kept() -> None:
    """As of a row of a mixture that does not lead, whose tokens end with its prompt while its window has moved on."""
    decoder = Decoder(SHAPES["windows"]).eval()
    prefixes = PrefixCache(decoder, 2 * keep_for(PrefixCache(decoder), decoder, "a", IDS))
    for number in range(2):
        keep_for(prefixes, decoder, "a", [number, *IDS[1:]])
    assert keep_for(prefixes, decoder, "b", [5, *IDS[1:], *IDS, *IDS], 40) == 0
    assert len(prefixes) == 2


def test_prompts_of_which_nothing_can_be_kept_do_not_wait_for_each_other(checkpoint: Checkpoint) -> None:
    batch, passes = Batch(checkpoint, max_sequences=8, prefixes=PrefixCache(checkpoint.decoder, 100)), list[int]()
    for number in range(6):
        add(batch, started(checkpoint, [*HISTORY[:36], 60 + number]))
    hook = checkpoint.decoder.register_forward_pre_hook(lambda *_: passes.append(1))
    batch.step()
    hook.remove()
    assert len(passes) == 1


def test_a_text_that_is_done_does_not_fail_where_it_cannot_be_kept(checkpoint, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(DecoderState, "extract_row", fail)
    prefixes = PrefixCache(checkpoint.decoder)
    batch = Batch(checkpoint, max_sequences=4, prefixes=prefixes)
    sequence = add(batch, started(checkpoint, HISTORY, max_tokens=1))
    batch.step()
    assert (sequence.failure, sequence.is_done) == (None, True)
    assert len(prefixes) == prefixes.num_bytes == 0


def test_a_beginning_that_cannot_be_copied_fails_its_own_request_alone(checkpoint, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    prefixes = PrefixCache(checkpoint.decoder)
    keep(prefixes, checkpoint, HISTORY)
    monkeypatch.setattr(DecoderState, "copy_start", fail)
    batch = Batch(checkpoint, max_sequences=4, prefixes=prefixes)
    other = add(batch, started(checkpoint, [99, 98, 97], caller="other"))
    own = add(batch, started(checkpoint, [*HISTORY, 61]))
    assert {*batch.step()} == {other, own}
    assert isinstance(own.failure, MemoryError)
    assert other.failure is None
    assert other.tokens


def test_a_step_copies_as_much_as_it_has_time_for(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = PrefixCache(checkpoint.decoder)
    keep(prefixes, checkpoint, HISTORY)
    monkeypatch.setattr("memlm.generation.prefill.COPIED_BYTES", 1)
    batch = Batch(checkpoint, max_sequences=4, prefixes=prefixes)
    sequences = [add(batch, started(checkpoint, [*HISTORY, 61 + number], max_tokens=6)) for number in range(3)]
    assert batch.step() == sequences[:1]
    assert set(batch.step()) == {*sequences[:2]}


def test_of_large_texts_that_end_together_one_is_kept(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memlm.generation.batch.KEPT_BYTES", 1)
    prefixes = PrefixCache(checkpoint.decoder)
    batch = Batch(checkpoint, max_sequences=4, prefixes=prefixes)
    for number in range(3):
        add(batch, started(checkpoint, [number, *HISTORY[1:]], max_tokens=1))
    while len(batch):
        batch.step()
    assert len(prefixes) == 1


def test_an_unloaded_datastore_leaves_no_state(model_folder, corpus_folder, tmp_path) -> None:
    """Another process may delete its documents, which nothing here would see."""
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "store", check="none")
    with load(model_folder, [tmp_path / "store"]) as model:
        model.generate(HISTORY, **GREEDY).result()
        assert model.engine.prefixes.num_bytes
        model.unload_datastore("store")
        assert model.engine.prefixes.num_bytes == 0


def test_a_datastore_that_is_replaced_leaves_no_state(model_folder, corpus_folder, tmp_path) -> None:
    for name in "ab":
        build_index(model_folder, Corpus([corpus_folder]), tmp_path / name, check="none")
    with load(model_folder, {"store": tmp_path / "a"}) as model:
        model.generate(HISTORY, **GREEDY).result()
        assert length_found(model.engine.prefixes, HISTORY)
        model.load_datastore(tmp_path / "b", name="store", replace=True)
        assert model.engine.prefixes.num_bytes == 0
