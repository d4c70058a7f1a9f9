"""Every kind of position, block and memory against its float64 twin, and the rules that all of them keep."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from decoders import ALL, MEMORY, SHAPE, WITH_MEMORY, logits, make, plain, sampled, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_twins import Twin

from memlm.errors import Corrupt, Incompatible, InvalidInput
from memlm.model import Compression, Decoder, DecoderState, Memorizing, ModelConfig, RopeScaling
from memlm.model.attention.mask import AttentionMask
from memlm.model.kernels import cpu
from memlm.model.kernels.cpu import upcast_buffer
from memlm.model.state.rows import Row

PIECES = ([1] * 33, [6] * 5 + [3], [12, 1, 12, 8], [1, 32], [7, 19, 7])


@pytest.fixture(params=sampled(ALL))
def decoder(request) -> Decoder:
    return make(ALL[request.param])


@pytest.fixture(params=sampled(WITH_MEMORY))
def memorious(request) -> Decoder:
    return make(WITH_MEMORY[request.param])


@pytest.mark.parametrize("name", ALL)
def test_it_equals_its_float64_twin(name):
    decoder, tokens = make(ALL[name]), tokens_of(33)
    np.testing.assert_allclose(logits(decoder, tokens).numpy(), Twin(decoder).logits(tokens), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("pieces", PIECES)
def test_the_pieces_a_text_comes_in_change_nothing(decoder, pieces):
    tokens, state, read, place = tokens_of(33), decoder.new_state(), [], 0
    for size in pieces:
        read.append(logits(decoder, tokens[place : place + size], state))
        place += size
    torch.testing.assert_close(torch.cat(read), logits(decoder, tokens), atol=1e-6, rtol=1e-6)


@settings(derandomize=True, max_examples=60)
@given(
    name=st.sampled_from(sorted(ALL)),
    pieces=st.lists(st.integers(1, 12), min_size=1, max_size=10),
    starts=st.sets(st.integers(1, 32), max_size=3),
)
def test_any_decoder_reads_a_text_alike_in_any_pieces_and_with_documents_anywhere(name, pieces, starts):
    decoder, length = make(ALL[name]), min(33, sum(pieces))
    tokens_BT = torch.tensor([tokens_of(length, 1), tokens_of(length, 2)])
    starts_BT = torch.zeros(2, length, dtype=torch.bool)
    starts_BT[0, [start for start in starts if start < length]] = True
    state, read, place = decoder.new_state(batch_size=2), [], 0
    with torch.inference_mode():
        while place < length:
            piece = slice(place, place + pieces[len(read) % len(pieces)])
            read.append(decoder.logits(decoder(tokens_BT[:, piece], state, starts_BT=starts_BT[:, piece])[0]))
            place = piece.stop
        first = decoder.logits(decoder(tokens_BT[:1], starts_BT=starts_BT[:1])[0])[0]
    torch.testing.assert_close(torch.cat(read, dim=1)[0], first, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.cat(read, dim=1)[1], logits(decoder, tokens_BT[1].tolist()), atol=1e-6, rtol=1e-6)


def test_a_later_token_changes_nothing_before_it(decoder):
    tokens = tokens_of(33)
    before = logits(decoder, tokens)
    for place in (0, 4, 5, 6, 11, 12, 20, 31, 32):
        changed = [*tokens]
        changed[place] = (changed[place] + 1) % 40
        after = logits(decoder, changed)
        assert torch.equal(after[:place], before[:place])
        assert not torch.allclose(after[place], before[place])


def test_rows_of_a_batch_neither_see_nor_need_each_other(decoder):
    rows = [tokens_of(21, seed) for seed in range(3)]
    with torch.inference_mode():
        together = decoder.logits(decoder(torch.tensor(rows))[0])
        backwards = decoder.logits(decoder(torch.tensor(rows[::-1]))[0])
    for row, tokens in enumerate(rows):
        torch.testing.assert_close(together[row], logits(decoder, tokens), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(backwards[2 - row], together[row], atol=1e-12, rtol=0)


@pytest.fixture(params=["fused", "products"])
def multiplied(request, monkeypatch) -> None:
    """Both ways to attend, each the faster one on some processor."""
    if request.param == "products":
        kernels = {True: cpu.sdpa_of_one, False: cpu.sdpa_in_blocks}
        monkeypatch.setattr(cpu, "choose_sdpa", lambda query_BHTd: kernels[query_BHTd.shape[2] == 1])
        monkeypatch.setattr(cpu, "UPCAST_BYTES", 1)  # a head at a time


@pytest.mark.usefixtures("multiplied")
def test_rows_of_unequal_lengths_read_as_if_they_were_alone(decoder):
    lengths, more = [3, 17, 9], [tokens_of(9, seed + 10) for seed in range(3)]
    rows = [tokens_of(17, seed) for seed in range(3)]
    with torch.inference_mode():
        state = decoder.new_state(batch_size=3)
        padded = decoder.logits(decoder(torch.tensor(rows), state, new_B=lengths)[0])
        steps = [decoder.logits(decoder(torch.tensor(more)[:, [t]], state)[0]) for t in range(9)]
    for row, length in enumerate(lengths):
        alone = logits(decoder, rows[row][:length] + more[row])
        torch.testing.assert_close(padded[row, :length], alone[:length], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(torch.cat(steps, dim=1)[row], alone[length:], atol=1e-6, rtol=1e-6)
    assert [row.length for row in state.rows] == [12, 26, 18]


def test_threads_that_read_at_once_do_not_widen_into_the_same_memory():
    mine_NSd, theirs_NSd = torch.ones(2, 3, 4).bfloat16(), torch.zeros(2, 3, 4).bfloat16()
    widened_NSd = upcast_buffer(mine_NSd, torch.float32)
    with ThreadPoolExecutor(1) as other:
        other.submit(upcast_buffer, theirs_NSd, torch.float32).result()
    assert torch.equal(widened_NSd, mine_NSd.float())


def test_a_reset_row_is_as_good_as_new_and_the_others_do_not_notice(decoder):
    first, second = [tokens_of(20, seed) for seed in (1, 2)], tokens_of(13, 3)
    with torch.inference_mode():
        state, kept = decoder.new_state(batch_size=2), decoder.new_state(batch_size=2)
        for each in (state, kept):
            decoder(torch.tensor(first), each)
        state.reset(0)
        after = decoder.logits(decoder(torch.tensor([second, second]), state)[0])
        untouched = decoder.logits(decoder(torch.tensor([second, second]), kept)[0])
    torch.testing.assert_close(after[0], logits(decoder, second), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(after[1], untouched[1], atol=1e-6, rtol=1e-6)


def test_a_state_that_was_reset_is_bit_equal_to_a_fresh_one(decoder):
    state = decoder.new_state()
    logits(decoder, tokens_of(26), state)
    state.reset(0)
    assert torch.equal(logits(decoder, tokens_of(19, 5), state), logits(decoder, tokens_of(19, 5), decoder.new_state()))


def test_forks_go_their_own_ways_and_saved_states_come_back_bit_equal(decoder):
    state = decoder.new_state()
    logits(decoder, tokens_of(16), state)
    fork, restored = state.fork(), DecoderState.restore(state.save(), decoder.config)
    expected = logits(decoder, tokens_of(15, 2), state)
    logits(decoder, tokens_of(9, 7), fork.fork())
    assert torch.equal(logits(decoder, tokens_of(15, 2), fork), expected)
    assert torch.equal(logits(decoder, tokens_of(15, 2), restored), expected)


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("read", [2, 9, 21])
def test_tokens_that_were_taken_back_were_never_read(decoder, read, kept):
    rows, drafts = (
        [tokens_of(read + row, row) for row in range(3)],
        torch.tensor([tokens_of(5, 10 + n) for n in range(3)]),
    )
    after = torch.tensor([tokens_of(12, 20 + row) for row in range(3)])
    with torch.inference_mode():
        state = decoder.new_state(batch_size=3)
        for t in range(read + 2):
            new_B = [int(t < len(tokens)) for tokens in rows]
            decoder(torch.tensor([[*tokens, 0, 0, 0][t : t + 1] for tokens in rows]), state, new_B=new_B)
        twin, lengths = state.fork(), [row.length for row in state.rows]
        room_B = state.draft_room_B()
        new_B, kept_B = [min(5, room) for room in room_B], [min(kept, room) for room in room_B]
        if max(new_B):
            decoder(drafts[:, : max(new_B)], state, new_B=new_B)
        state.crop([length + count for length, count in zip(lengths, kept_B, strict=True)])
        if max(kept_B):
            decoder(drafts[:, : max(kept_B)], twin, new_B=kept_B)
        expected, found = (
            torch.cat([decoder.logits(decoder(after[:, t : t + 1], each)[0]) for t in range(12)], dim=1)
            for each in (twin, state)
        )
    if kept:
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kept", [2, 4])
def test_drafts_that_were_taken_back_were_never_read_wherever_a_window_or_a_segment_stands(decoder, kept, monkeypatch):
    """Each row reads a draft of its own length. Drafts begin with windows and segments filled to different degrees."""
    monkeypatch.setattr("memlm.model.state.size.SPARE_PLACES", 8)  # so that windows move
    rows = [tokens_of(2 + row, row) for row in range(3)]
    after = torch.tensor([tokens_of(12, 20 + row) for row in range(3)])
    with torch.inference_mode():
        state = decoder.new_state(batch_size=3)
        for t in range(4):
            new_B = [int(t < len(tokens)) for tokens in rows]
            decoder(torch.tensor([[*tokens, 0, 0, 0][t : t + 1] for tokens in rows]), state, new_B=new_B)
        twin = state.fork()
        for number in range(9):
            if (room := state.room()) is not None and room < 5 + 1 + 12:
                break
            drafts = torch.tensor([tokens_of(5, 10 * number + row) for row in range(3)])
            lengths, room_B = [row.length for row in state.rows], state.draft_room_B()
            most_B = [max(0, min(most, room - 1)) for most, room in zip((3, 5, 2), room_B, strict=True)]
            kept_B = [min(kept, most) for most in most_B]
            if max(most_B):
                decoder(drafts[:, : max(most_B)], state, new_B=most_B)
                decoder.crop(state, [length + count for length, count in zip(lengths, kept_B, strict=True)])
            for t in range(max(kept_B)):
                decoder(drafts[:, t : t + 1], twin, new_B=[int(t < count) for count in kept_B])
            assert [row.length for row in state.rows] == [row.length for row in twin.rows]
            if state.usage_LBS is not None and twin.usage_LBS is not None:
                for row, used in enumerate(state.places_B()):
                    torch.testing.assert_close(state.usage_LBS[:, row, :used], twin.usage_LBS[:, row, :used])
            for each in (state, twin):  # so that no row stays before the end of a segment
                decoder(drafts[:, :1], each)
        expected, found = (
            torch.cat([decoder.logits(decoder(after[:, t : t + 1], each)[0]) for t in range(12)], dim=1)
            for each in (twin, state)
        )
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_tokens_that_memory_took_over_or_of_an_earlier_pass_are_not_taken_back(memorious):
    state, end = memorious.new_state(), memorious.config.context_length
    while state.rows[0].floor == 0:
        logits(memorious, tokens_of(end - 2), state)
        logits(memorious, tokens_of(1), state)
        with pytest.raises(ValueError, match="cannot go back to"):
            state.crop([state.length - 2])
        logits(memorious, tokens_of(1), state)
    with pytest.raises(ValueError, match="cannot go back to"):
        state.crop([state.length - 1])


def test_a_saved_state_is_refused_by_another_model_and_when_it_is_broken(memorious):
    data = memorious.new_state().save()
    with pytest.raises(Incompatible, match="another shape"):
        DecoderState.restore(data, replace(memorious.config, norm_eps=1e-3))
    for broken in (b"", data[:-3], b"\0" * 100):
        with pytest.raises(Corrupt):
            DecoderState.restore(broken, memorious.config)


def test_memory_reaches_as_far_as_it_should_and_no_further(memorious):
    """The first token, changed, is noticed for as long as some memory holds it."""
    tokens = tokens_of(33)
    changed = [(tokens[0] + 1) % 40, *tokens[1:]]
    difference = (logits(memorious, tokens) - logits(memorious, changed)).abs().amax(dim=1)
    assert (difference[:6] > 1e-9).all()
    assert (difference[6:12] > 1e-9).any()


@pytest.mark.parametrize("offset", range(7))
def test_a_document_may_begin_anywhere_in_a_segment(memorious, offset):
    """What follows a start reads as if its row began there, its first segment being what is left of this one."""
    before, text = tokens_of(12 + offset, 1), tokens_of(26, 2)
    starts = torch.zeros(1, 38 + offset, dtype=torch.bool)
    starts[0, len(before)] = True
    with torch.inference_mode():
        got = memorious.logits(memorious(torch.tensor([before + text]), starts_BT=starts)[0])[0]
        others = [(token + 1) % 40 for token in before]
        after_others = memorious.logits(memorious(torch.tensor([others + text]), starts_BT=starts)[0])[0]
    assert torch.equal(got[len(before) :], after_others[len(before) :])
    torch.testing.assert_close(got[: len(before)], logits(memorious, before), atol=1e-9, rtol=1e-9)
    fresh = memorious.new_state()
    fresh.rows = [Row(base=offset, length=offset, start=offset, floor=offset)]
    torch.testing.assert_close(got[len(before) :], logits(memorious, text, fresh), atol=1e-9, rtol=1e-9)
    if offset in (0, 6):
        torch.testing.assert_close(got[len(before) :], logits(memorious, text), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("places", [[8, 15, 16], [3], [1, 7, 13, 20]])
def test_rows_whose_documents_begin_at_different_places_read_as_if_they_were_alone(memorious, places):
    rows = torch.tensor([tokens_of(40, 1), tokens_of(40, 2)])
    starts = torch.zeros(2, 40, dtype=torch.bool)
    starts[0, places] = True
    with torch.inference_mode():
        got = memorious.logits(memorious(rows, starts_BT=starts)[0])
        first = memorious.logits(memorious(rows[:1], starts_BT=starts[:1])[0])
    torch.testing.assert_close(got[0], first[0], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(got[1], logits(memorious, rows[1].tolist()), atol=1e-9, rtol=1e-9)


def test_a_long_text_needs_no_more_room_than_a_segment_and_its_memories(memorious):
    state = memorious.new_state()
    logits(memorious, tokens_of(40), state)
    reserved = state.num_bytes
    for _ in range(5):
        logits(memorious, tokens_of(40), state)
    assert state.num_bytes == reserved
    assert state.room() is None


def test_a_window_moves_through_a_text_longer_than_its_places():
    decoder = make(replace(plain("rotary"), windows=(5, 3), context_length=400))
    tokens, state = tokens_of(300), decoder.new_state()
    stepped = torch.cat([logits(decoder, tokens[i : i + 3], state) for i in range(0, 300, 3)])
    torch.testing.assert_close(stepped, logits(decoder, tokens), atol=1e-6, rtol=1e-6)
    assert state.num_local < 300
    restored = DecoderState.restore(state.save(), decoder.config)
    more = tokens_of(90, 2)
    torch.testing.assert_close(logits(decoder, more, restored), logits(decoder, more, state), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"positions": "psychic"}, {"norm": "batch"}, {"windows": (3,)}, {"num_sinks": 2}, {"xl_length": -1},
        {"compression": Compression(length=2)}, {"memorizing": replace(MEMORY, layers=(2,))},
        {"xl_length": 2, "positions": "learned"}, {"rotary_dim": 3}, {"num_kv_heads": 3},
        {"parallel_residual": True, "norm_order": "post"}, {"activation": "swish"},
    ],
)  # fmt: skip
def test_shapes_that_mean_nothing_are_refused(change):
    with pytest.raises(InvalidInput):
        replace(SHAPE, **change)


@pytest.mark.parametrize(
    ("part", "given"),
    [
        (Memorizing, {"layers": (0,), "top_k": 0}), (Memorizing, {"layers": (0,), "mixing": "loud"}),
        (Compression, {"length": 2, "kind": "zip"}), (Compression, {"length": 0}),
        (Compression, {"length": 2, "loss": "regret"}), (RopeScaling, {"kind": "dynamic", "factor": 2.0}),
        (RopeScaling, {"kind": "yarn", "factor": 2.0}),
    ],
)  # fmt: skip
def test_memories_that_mean_nothing_are_refused(part, given):
    with pytest.raises(InvalidInput):
        part(**given)


def test_a_config_survives_json():
    import json

    for config in ALL.values():
        assert ModelConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config
    with pytest.raises(InvalidInput, match="hidden_size"):
        ModelConfig.from_dict({**SHAPE.as_dict(), "hidden_size": 3})


def test_learned_positions_begin_anew_with_each_segment_wherever_the_document_began():
    decoder = make(WITH_MEMORY["memorizing learned positions"])
    query, tokens = torch.arange(14, 26)[None], torch.zeros(1, 12, dtype=torch.int64)
    spans = (14, 26), (14, 26)
    mask = AttentionMask(query, query, *spans, torch.full_like(query, 14), torch.zeros(1, dtype=torch.int64))
    added = decoder.embed(tokens, mask) - decoder.embedding(tokens)
    expected = decoder.positions.weight[[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1]]
    torch.testing.assert_close(added[0], expected)
