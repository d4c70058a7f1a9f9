"""Sessions: what was read is gone on from, by itself, whatever else happens; and what was acknowledged survives."""

import time
from pathlib import Path

import pytest
import torch
from batch_helpers import add, start
from conftest import SHAPE
from running import alike

from memlm.base.steps import run_steps
from memlm.errors import Corrupt, Incompatible, InvalidInput, Locked, NotFound
from memlm.generation.batch import Batch
from memlm.generation.sessions.sessions import Sessions
from memlm.language_model import LanguageModel
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint

TEXT = "the memory of a model can be read and edited"
KINDS = {
    "plain": {},
    "windows": {"windows": [5, 9]},
    "sinks": {"windows": [6, 6], "num_sinks": 2},
    "xl": {"positions": "transformer_xl", "xl_length": 12, "context_length": 8},
    "memorizing": {"memorizing": {"layers": [1], "top_k": 4, "capacity": 60}},
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request, tokenizer, tmp_path_factory) -> Path:
    torch.manual_seed(2)
    decoder = Decoder(ModelConfig.from_dict({**SHAPE, "vocab_size": tokenizer.vocab_size, **KINDS[request.param]}))
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    folder = tmp_path_factory.mktemp("kinds") / request.param
    save_checkpoint(folder, decoder, tokenizer)
    return folder


@pytest.fixture
def model(kind) -> LanguageModel:
    return LanguageModel(load_checkpoint(kind))


def ids_of(model: LanguageModel, *texts: str) -> tuple[int, ...]:
    return tuple(each for text in texts for each in model.tokenize(text))


def after(model: LanguageModel, ids: tuple[int, ...], count: int) -> list:
    """Greedy tokens after some others, read at once by a session of their own."""
    with model.session() as session:
        session.append(token_ids=ids)
        return list(session.generate(temperature=0, max_tokens=count))


@pytest.mark.parametrize(("option", "error"), [({"context_cache": 5}, InvalidInput), ({"early_exit": True}, NotFound)])
def test_a_request_that_is_refused_leaves_its_session_free(model, option, error):
    with model.session() as session:
        with pytest.raises(error):
            session.generate(TEXT, max_tokens=1, **option)
        session.generate(TEXT, max_tokens=1).result()
        assert session.info().num_tokens >= len(model.tokenize(TEXT))


def test_a_text_in_pieces_is_the_text_at_once(model):
    whole = list(model.generate(TEXT, temperature=0, max_tokens=8))
    ids = ids_of(model, TEXT)
    with model.session() as session:
        for begin in range(0, len(ids), 3):
            session.append(token_ids=ids[begin : begin + 3])
        assert session.info().num_tokens == len(ids)
        assert alike(session.generate(temperature=0, max_tokens=8), whole)
    assert alike(after(model, ids, 8), whole)


def test_a_session_holds_prompts_and_tokens_of_what_came_to_its_end(model):
    with model.session() as session:
        session.append(TEXT)
        first = list(session.generate(" it", temperature=0, max_tokens=4))
        held = (*ids_of(model, TEXT, " it"), *(token.id for token in first))
        assert session.info().num_tokens == len(held)
        second = list(session.generate(temperature=0, max_tokens=4))
    assert alike(second, after(model, held, 4))


def test_what_is_cancelled_leaves_a_session_as_it_was(model):
    with model.session() as session:
        session.append(TEXT)
        before = session.info().num_tokens
        stream = session.generate(" while", temperature=0, max_tokens=8)
        next(stream)
        assert session.info().busy
        with pytest.raises(Locked, match="being used"):
            session.generate(" it")
        with pytest.raises(Locked):
            session.append("more")
        stream.close()
        assert (session.info().num_tokens, session.info().busy) == (before, False)
        steps = model.engine.sessions.append(session.name, "serves; " * 3)
        steps.close()
        assert (session.info().num_tokens, session.info().busy) == (before, False)
        with pytest.raises(InvalidInput):
            session.generate(" it", stop=("",))
        assert alike(session.generate(temperature=0, max_tokens=3), after(model, ids_of(model, TEXT), 3))


def test_a_fork_goes_its_own_way(model):
    with model.session() as session:
        session.append(TEXT)
        with session.fork() as twin:
            assert twin.name != session.name
            twin.append(" and delete a page")
            assert session.info().num_tokens == len(ids_of(model, TEXT))
            assert alike(
                twin.generate(temperature=0, max_tokens=3), after(model, ids_of(model, TEXT, " and delete a page"), 3)
            )
        assert alike(session.generate(temperature=0, max_tokens=3), after(model, ids_of(model, TEXT), 3))


@pytest.mark.parametrize("apart", [False, True], ids=["in rows", "apart"])
def test_sessions_go_on_side_by_side(model, monkeypatch, apart):
    if apart:
        monkeypatch.setattr("memlm.generation.batch.APART_BYTES", 0)
        monkeypatch.setattr("memlm.generation.batch.APART_SHARE", 1 << 60)
    texts = [TEXT, "a page, and it is silent: ", "the"]
    sessions = [model.session() for _ in texts]
    for session, text in zip(sessions, texts, strict=True):
        session.append(text)
    from memlm.api.params import GenerateRequest

    batch, tokens_of = Batch(model.checkpoint, max_sequences=4), {}
    for session in sessions:
        options = {"session": session.name, "temperature": 0, "max_tokens": 5}
        tokens_of[add(batch, start(model, GenerateRequest.of("", options)))] = []
    while len(batch):
        for sequence in batch.step():
            tokens_of[sequence] += sequence.tokens
            if sequence.state is not None:
                run_steps(sequence.generation.commit_to_session(sequence.state))
    for session, text, tokens in zip(sessions, texts, tokens_of.values(), strict=True):
        ids = ids_of(model, text)
        assert alike(tokens, after(model, ids, 5))
        held = (*ids, *(token.id for token in tokens))
        assert not session.info().busy
        if session.info().num_tokens == len(held):
            assert alike(session.generate(temperature=0, max_tokens=2), after(model, held, 2))


def test_sessions_survive_a_restart_to_the_bit(kind, tmp_path):
    first = LanguageModel(load_checkpoint(kind), sessions=Sessions(load_checkpoint(kind), folder=tmp_path / "kept"))
    session = first.session()
    session.append(TEXT)
    list(session.generate(" it", temperature=0, max_tokens=3))
    twin = session.fork()
    expected = [token.logprob for token in twin.generate(temperature=0, max_tokens=5)]
    checkpoint = load_checkpoint(kind)
    again = LanguageModel(checkpoint, sessions=Sessions(checkpoint, folder=tmp_path / "kept"))
    assert {info.name for info in again.list_sessions()} == {session.name, twin.name}
    assert again.get_session(session.name).num_tokens == session.info().num_tokens
    tokens_of = again.generate("", session=session.name, temperature=0, max_tokens=5)
    assert [token.logprob for token in tokens_of] == expected
    again.delete_session(twin.name)
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_a_changed_file_and_another_models_are_refused_by_name(model_folder, checkpoint, tmp_path):
    kept = Sessions(checkpoint, folder=tmp_path)
    name = run_steps(kept.create()).name
    run_steps(kept.append(name, TEXT))
    (path,) = tmp_path.iterdir()
    sound = path.read_bytes()
    for place in (0, 30, len(sound) // 2, len(sound) - 1):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with pytest.raises(Corrupt, match=name):
            Sessions(checkpoint, folder=tmp_path)
    path.write_bytes(sound[:-5])
    with pytest.raises(Corrupt, match="checksum"):
        Sessions(checkpoint, folder=tmp_path)
    path.write_bytes(sound)
    other = load_checkpoint(model_folder)
    other.decoder.norm.weight.data[0] += 1
    save_checkpoint(tmp_path / "other", other.decoder, other.tokenizer)
    with pytest.raises(Incompatible, match="another model"):
        Sessions(load_checkpoint(tmp_path / "other"), folder=tmp_path)
    assert len(Sessions(checkpoint, folder=tmp_path)) == 1


def test_anothers_session_is_not_there(checkpoint):
    sessions = Sessions(checkpoint)
    name = run_steps(sessions.create(owner="ann")).name
    for use in (sessions.get, sessions.lease):
        with pytest.raises(NotFound, match="no session"):
            use(name, owner="ben")
    for steps in (sessions.fork(name, owner="ben"), sessions.delete(name, owner="ben")):
        with pytest.raises(NotFound, match="no session"):
            run_steps(steps)
    assert sessions.list(owner="ben") == ()
    run_steps(sessions.delete(name, owner="ann"))
    with pytest.raises(NotFound, match="it was deleted"):
        sessions.get(name, owner="ann")
    with pytest.raises(NotFound, match="create one"):
        sessions.get(name, owner="ben")


def test_unused_sessions_go_and_say_why(checkpoint):
    sessions = Sessions(checkpoint, ttl_s=0.05)
    name, longer = run_steps(sessions.create()).name, run_steps(sessions.create(ttl_s=60)).name
    busy = run_steps(sessions.create())
    lease = sessions.lease(busy.name)
    time.sleep(0.08)
    assert {info.name for info in sessions.list()} == {longer, busy.name}
    with pytest.raises(NotFound, match="not used for"):
        sessions.get(name)
    lease.end(None)
    with pytest.raises(InvalidInput, match="ttl_s"):
        run_steps(sessions.create(ttl_s=0))


def test_the_least_recently_used_goes_where_room_is_short(checkpoint):
    sessions = Sessions(checkpoint)
    names = [run_steps(sessions.create()).name for _ in range(4)]
    for name in names[:3]:
        run_steps(sessions.append(name, TEXT))
    sessions._max_bytes = sessions.num_bytes
    sessions.lease(names[0]).end(None)
    run_steps(sessions.append(names[3], TEXT))
    with pytest.raises(NotFound, match="make room"):
        sessions.get(names[1])
    assert sessions.get(names[0]).num_bytes > 0
    assert sessions.num_bytes <= sessions._max_bytes


def test_more_than_the_context_is_refused_and_leaves_the_session(checkpoint):
    lm = LanguageModel(checkpoint)
    with lm.session() as session:
        session.append(TEXT)
        with pytest.raises(InvalidInput, match="context has 47"):
            session.append("the " * 60)
        with pytest.raises(InvalidInput, match="max_tokens"):
            session.generate(max_tokens=60)
        assert not session.info().busy
        with pytest.raises(InvalidInput, match="either text or token_ids"):
            session.append()
        with pytest.raises(InvalidInput, match="outside the vocabulary"):
            session.append(token_ids=(10**6,))
        assert session.info().num_tokens == len(lm.tokenize(TEXT))
