"""A session that forgets a span of its text is the session that never had it."""

import random
from dataclasses import replace

import pytest
import torch
from chats import save_chat_model
from conftest import SHAPE
from crashes import is_killed_at
from running import alike

from memlm.base.steps import run_steps
from memlm.errors import InvalidInput, Locked, NotFound
from memlm.generation.sessions.files import SessionState
from memlm.generation.sessions.sessions import Sessions
from memlm.language_model import LanguageModel, load
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint
from memlm.retrieval.own_past import ContextSettings

SEGMENTED = {"positions": "transformer_xl", "xl_length": 12, "context_length": 8}
KINDS = {
    "rotary": {"context_length": 64},
    "one window": {"windows": [0, 9], "context_length": 64},
    "sinks": {"windows": [6, 6], "num_sinks": 2},
    "extended": {"windows": [6, 6], "num_sinks": 2, "extended_attention": 3},
    "xl": SEGMENTED,
    "compressive": {**SEGMENTED, "compression": {"kind": "conv", "rate": 2, "length": 6}},
    "most used": {**SEGMENTED, "compression": {"kind": "most_used", "rate": 2, "length": 6}},
    "memorizing": {"context_length": 8, "memorizing": {"layers": [1], "top_k": 4, "capacity": 60}},
}
CACHED = ("rotary", "sinks", "memorizing")
# The first token, the first ones, some in a segment and over several, some near the end, the last, all but the last.
SPANS = [(0, 1), (0, 30), (3, 5), (20, 50), (-3, -1), (-1, 0), (-8, 0), (0, -1)]


@pytest.fixture(scope="module", params=[*KINDS, *(f"{kind}, context cache" for kind in CACHED)])
def model(request, tokenizer, tmp_path_factory) -> LanguageModel:
    kind, _, cached = request.param.partition(", ")
    torch.manual_seed(2)
    decoder = Decoder(ModelConfig.from_dict({**SHAPE, "vocab_size": tokenizer.vocab_size, **KINDS[kind]}))
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    folder = tmp_path_factory.mktemp("kinds") / "model"
    save_checkpoint(folder, decoder, tokenizer)
    if cached:
        ContextSettings(k=4, temperature=20.0, lam=0.4).save(folder)
    return load(folder)


def long_ids(lm: LanguageModel) -> tuple[int, ...]:
    """As long as the context allows, and longer than a window of the models that read texts of any length."""
    return random_ids(lm, 203 if lm.checkpoint.decoder.config.max_length is None else 53)


def random_ids(lm: LanguageModel, count: int) -> tuple[int, ...]:
    rng = random.Random(count)
    return tuple(rng.randrange(3, lm.tokenizer.vocab_size) for _ in range(count))


def without(ids, start: int, stop: int) -> tuple[int, ...]:
    return (*ids[:start], *ids[stop:])


def state_of(lm: LanguageModel, name: str) -> SessionState:
    return lm.engine.sessions._sessions[name].state


def assert_same(lm: LanguageModel, one: str, other: str) -> None:
    """All that later requests use is the same, up to the rounding that other pieces of a text cause."""
    mine, expected = state_of(lm, one), state_of(lm, other)
    assert (mine.pending_ids, mine.context_ids, mine.num_read, mine.past_size, mine.ends_in_answer) == (
        expected.pending_ids, expected.context_ids, expected.num_read, expected.past_size, expected.ends_in_answer
    )  # fmt: skip
    if expected.past is not None:
        size = expected.past_size
        for name in ("_keys_ND", "_values_N"):
            ours, theirs = (getattr(each.past, name) for each in (mine, expected))
            torch.testing.assert_close(ours[: size - 1], theirs[: size - 1], atol=2e-2, rtol=2e-3)
        assert not (mine.past._values_N[size - 1 : size] >= 0).any()
    options = {"temperature": 0, "drafts": 3, "max_tokens": 4}
    tokens, expected_tokens = (
        list(lm.generate(random_ids(lm, 3), session=lm.fork_session(name).name, **options)) for name in (one, other)
    )
    assert alike(tokens, expected_tokens)


@pytest.mark.parametrize(("start", "stop"), SPANS)
def test_a_session_is_as_if_it_had_never_had_the_span(model, start, stop):
    ids = long_ids(model)
    start, stop = start % len(ids), stop % len(ids) or len(ids)
    with model.session() as session, model.session() as other:
        for begin in range(0, len(ids), 25):
            session.append(token_ids=ids[begin : begin + 25])
        assert session.forget(start, stop).num_tokens == len(ids) - (stop - start)
        other.append(token_ids=without(ids, start, stop))
        assert_same(model, session.name, other.name)


def test_spans_of_what_was_generated_are_forgotten_too(model):
    with model.session() as session, model.session() as other:
        list(session.generate("the memory of", temperature=0, max_tokens=9, drafts=3, loop_guard=False))
        ids = state_of(model, session.name).context_ids
        session.forget(4, len(ids) - 3)
        other.append(token_ids=without(ids, 4, len(ids) - 3))
        assert_same(model, session.name, other.name)
        list(session.generate(" and edited", temperature=0, max_tokens=3))
        session.forget(1, 3)
        ids = state_of(model, session.name).context_ids
        with model.session() as again:
            again.append(token_ids=ids)
            assert_same(model, session.name, again.name)


def test_a_text_that_began_as_a_document_still_does(lm, monkeypatch):
    """A datastore was searched, so the text has the start token that a tokenizer without a prefix adds to no other."""
    monkeypatch.setattr(lm.tokenizer, "special", replace(lm.tokenizer.special, prefix=()))
    with lm.session() as session:
        list(session.generate("the memory of a model", temperature=0, max_tokens=3))
        for start, stop in ((2, 4), (0, 1)):
            session.forget(start, stop)
            assert state_of(lm, session.name).num_prefix == 1
        ids = [lm.tokenizer.start_id, *state_of(lm, session.name).context_ids]
        tokens, expected = session.generate(temperature=0, max_tokens=4), lm.generate(ids, temperature=0, max_tokens=4)
        assert alike(tokens, expected)


def test_a_session_that_forgets_all_is_empty(model):
    with model.session() as session:
        session.append(token_ids=random_ids(model, 20))
        assert session.forget(0, 20).num_tokens == 0
        assert state_of(model, session.name) == SessionState()
        session.append("the memory")
        with model.session() as other:
            other.append("the memory")
            assert_same(model, session.name, other.name)


def test_forks_keep_the_span(model):
    ids = random_ids(model, 30)
    with model.session() as session, model.session() as other:
        session.append(token_ids=ids)
        other.append(token_ids=ids)
        with session.fork() as fork:
            session.forget(5, 20)
            assert_same(model, fork.name, other.name)


def test_a_forgotten_span_that_is_broken_off_changes_nothing(model):
    ids = long_ids(model)
    with model.session() as session, model.session() as other:
        session.append(token_ids=ids)
        other.append(token_ids=ids)
        steps = model.engine.sessions.forget(session.name, 3, 9)
        for _ in range(2):
            next(steps)
        assert session.info().busy
        with pytest.raises(Locked, match="being used"):
            session.forget(1, 2)
        steps.close()
        assert not session.info().busy
        assert_same(model, session.name, other.name)


def test_only_what_has_to_be_is_read_again(model, monkeypatch):
    decoder, read, ids = model.checkpoint.decoder, list[int](), long_ids(model)
    with model.session() as session:
        session.append(token_ids=ids)
        keys = decoder.keys
        monkeypatch.setattr(decoder, "keys", lambda ids_BT, *rest: read.append(ids_BT.shape[1]) or keys(ids_BT, *rest))
        session.forget(len(ids) - 3, len(ids) - 2)
        all_left = state_of(model, session.name).num_read
        counts_use = decoder.config.compression is not None and decoder.config.compression.kind == "most_used"
        assert sum(read) == (all_left if counts_use else 1)
        read.clear()
        session.forget(3, 4)
        assert sum(read) == (all_left - 1 if decoder.config.max_length is None else len(ids) - 6)


def test_a_span_that_is_not_there_is_refused(lm):
    with lm.session() as session:
        num_tokens = session.append("the memory of a model").num_tokens
        for start, stop, words in (
            (2, 2, "has no token.*stop above the start"),
            (3, 1, "has no token"),
            (-1, 2, "start is -1; expected at least 0"),
            (0, num_tokens + 1, f"ends at {num_tokens + 1}, and the session has {num_tokens} tokens"),
            (10**9, 10**9 + 1, "ends at 1,000,000,001"),
            (0.5, 2, "whole number"),
        ):
            with pytest.raises(InvalidInput, match=words):
                session.forget(start, stop)
        assert session.info().num_tokens == num_tokens
        assert not session.info().busy
        with pytest.raises(NotFound, match="no session 'x'"):
            lm.forget_in_session("x", 0, 1)


def test_a_session_that_forgot_survives_a_restart_without_the_span(model, tmp_path):
    ids = long_ids(model)
    kept = Sessions(model.checkpoint, folder=tmp_path)
    name = run_steps(kept.create()).name
    run_steps(kept.append(name, token_ids=ids))
    run_steps(kept.forget(name, 20, 50))
    (path,) = tmp_path.iterdir()
    assert model.tokenizer.vocab_size < 1 << 15
    content = path.read_bytes()
    assert b"".join(each.to_bytes(4, "little") for each in ids[15:20]) in content
    assert b"".join(each.to_bytes(4, "little") for each in ids[20:25]) not in content
    restarted = LanguageModel(model.checkpoint, sessions=Sessions(model.checkpoint, folder=tmp_path))
    with restarted.session() as other:
        other.append(token_ids=without(ids, 20, 50))
        assert_same(restarted, name, other.name)


def test_a_kill_leaves_the_session_of_before_or_after(model_folder, tmp_path):
    checkpoint = load_checkpoint(model_folder)
    seen = set()
    for step in range(1, 10):
        folder = tmp_path / str(step)
        sessions = Sessions(checkpoint, folder=folder)
        name = run_steps(sessions.create()).name
        run_steps(sessions.append(name, "the memory of a model"))
        before = sessions.get(name).num_tokens
        killed = is_killed_at(step, lambda: run_steps(sessions.forget(name, 1, 3)))  # noqa: B023
        seen.add(Sessions(checkpoint, folder=folder).get(name).num_tokens - before)
        if not killed:
            break
    assert not killed
    assert seen == {0, -2}


def test_a_conversation_goes_on_after_its_last_turn_was_forgotten(tokenizer, tmp_path):
    options = {"temperature": 0, "max_tokens": 6}
    with load(save_chat_model(tmp_path / "chat", tokenizer)) as lm, lm.session() as session, lm.session() as other:
        for each in (session, other):
            list(each.chat("the memory of a model", **options))
        begin = session.info().num_tokens
        list(session.chat("can be read", **options))
        session.forget(begin, session.info().num_tokens)
        assert_same(lm, session.name, other.name)
        answers = [list(each.chat("and edited", **options)) for each in (session, other)]
        assert alike(*answers)
        session.forget(0, 2)  # the answers' ends move with them
        assert state_of(lm, session.name).ends_in_answer
        session.forget(begin - 3, begin)
        assert state_of(lm, session.name).answer_ends == (session.info().num_tokens,)
        session.forget(session.info().num_tokens - 1, session.info().num_tokens)
        assert not state_of(lm, session.name).ends_in_answer
