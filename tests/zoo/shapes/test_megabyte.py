"""What the paper says of MEGABYTE (arXiv 2305.07185), its states and its folder."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from decoders import SHAPE
from zoo.shapes.shape_twins import megabyte_logits

from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound
from memlm.zoo.shapes.fitting import fit
from memlm.zoo.shapes.megabyte import Megabyte, MegabyteConfig
from memlm.zoo.shapes.megabyte_state import MegabyteState

GLOBAL = replace(SHAPE, vocab_size=1, context_length=12)
LOCAL = replace(SHAPE, vocab_size=256, context_length=8)
CONFIG = MegabyteConfig(4, GLOBAL, LOCAL)
CONFIGS = {
    "plain": CONFIG,
    "patches of one byte": MegabyteConfig(1, replace(GLOBAL, context_length=30), LOCAL),
    "patches of three, sums and experts": MegabyteConfig(
        3,
        replace(GLOBAL, dim=24, positions="learned", layers=[{"mixer": {"kind": "performer", "features": 6}}]),
        replace(LOCAL, tied_embeddings=False, layers=[{"channel": {"kind": "experts", "experts": 3}}]),
    ),
    "a global model with a memory, sums in patches": MegabyteConfig(
        4,
        replace(GLOBAL, xl_length=2, context_length=3),
        replace(LOCAL, layers=[{"mixer": {"kind": "rfa", "draws": 5}}]),
    ),
}
NUM_BYTES = 23  # no multiple of a patch


def make(config=CONFIG, seed=1):
    torch.manual_seed(seed)
    model = Megabyte(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return model


def drawn(rows=3, length=NUM_BYTES, seed=0):
    return torch.randint(40, (rows, length), generator=torch.Generator().manual_seed(seed))


def close(got, expected):
    torch.testing.assert_close(got, expected.detach(), atol=1e-10, rtol=0)


@pytest.fixture(params=CONFIGS, scope="module")
def model(request):
    return make(CONFIGS[request.param])


def test_each_byte_is_predicted_as_by_the_twin(model):
    bytes_BT = drawn(2)
    got = model.predict(bytes_BT).detach().numpy()
    for row in range(2):
        np.testing.assert_allclose(got[row], megabyte_logits(model, bytes_BT[row].tolist()), atol=1e-10)


@pytest.mark.parametrize("pieces", [[NUM_BYTES], [1] * NUM_BYTES, [5, 1, 2, 3, 8, 4]], ids=str)
def test_pieces_of_any_length_are_one_reading(model, pieces):
    bytes_BT = drawn()
    expected, state, begin = model.predict(bytes_BT), model.new_state(3, capacity=48), 0
    close(state.logits_BV, expected[:, 0])
    for count in pieces:
        got = model.read(bytes_BT[:, begin : begin + count], state)
        begin += count
        assert state.lengths_B == [begin] * 3
        close(got[:, :-1], expected[:, begin - count + 1 : begin])
        if begin < NUM_BYTES:
            close(got[:, -1], expected[:, begin])
            close(state.logits_BV, expected[:, begin])


def test_rows_at_other_places_of_their_patches_read_as_alone(model):
    bytes_BT = drawn(3, 30)
    expected, state, begins = model.predict(bytes_BT), model.new_state(3, capacity=100), [0, 0, 0]
    steps = ([1, 3, 2], [1, 1, 1], [1, 1, 1], [2, 0, 7], [0, 0, 0], [3, 1, 1], [1, 9, 2], [1, 1, 1], [4, 2, 3])
    for step, new_B in enumerate(steps):
        if step == 5:  # another text begins in the second row
            model.reset(state, 1)
            begins[1] = 0
            close(state.logits_BV[1], expected[1, 0])
        T = max(1, *new_B) + step % 2  # padding behind all rows, too
        piece_BT = torch.full((3, T), 39)
        for row, (begin, new) in enumerate(zip(begins, new_B, strict=True)):
            piece_BT[row, :new] = bytes_BT[row, begin : begin + new]
        got = model.read(piece_BT, state, new_B=new_B)
        assert got.shape == (3, T, 256)
        for row, (begin, new) in enumerate(zip(begins, new_B, strict=True)):
            close(got[row, :new], expected[row, begin + 1 : begin + new + 1])
            close(state.logits_BV[row], expected[row, begin + new])
        begins = [begin + new for begin, new in zip(begins, new_B, strict=True)]
        assert state.lengths_B == begins


def test_a_byte_changes_its_own_patch_behind_it_and_later_ones_by_the_global_model_alone(monkeypatch):
    model, bytes_BT = make(), drawn(1)
    changed_BT = bytes_BT.clone()
    changed_BT[0, 9] = (changed_BT[0, 9] + 1) % 40
    before, after = model.predict(bytes_BT)[0], model.predict(changed_BT)[0]
    assert torch.equal(after[:10], before[:10])
    assert not torch.isclose(after[10:], before[10:]).all(dim=1).any()
    read = model.global_model.read
    monkeypatch.setattr(model.global_model, "read", lambda vectors: read(vectors * 0))
    before, after = model.predict(bytes_BT)[0], model.predict(changed_BT)[0]
    assert [t for t in range(NUM_BYTES) if not torch.equal(before[t], after[t])] == [10, 11]


def test_a_byte_costs_the_local_model_and_a_patch_the_global_one(monkeypatch):
    model, state, calls = make(), make().new_state(), []
    for name in ("global_model", "local_model"):
        decoder = getattr(model, name)
        monkeypatch.setattr(
            decoder, "read", lambda *a, r=decoder.read, n=name, **b: calls.append((n, a[0].shape[1])) or r(*a, **b)
        )
    for byte in range(8):
        model.read(torch.tensor([[byte]]), state)
    assert calls.count(("local_model", 1)) == 8
    assert calls.count(("global_model", 1)) == 2
    assert len(calls) == 10


def test_a_text_goes_on_from_a_fork_a_copied_row_and_a_saved_state(model):
    bytes_BT = drawn()
    with torch.inference_mode():
        state = model.new_state(3, capacity=60)
        model.read(bytes_BT[:, :10], state, new_B=[10, 7, 8])
        fork = state.fork()
        saved = state.save()
        expected = model.read(bytes_BT[:, 10:], state)
        restored = MegabyteState.restore(saved, model.config)
        assert restored.save() == saved
        assert torch.equal(model.read(bytes_BT[:, 10:], restored), expected)
        other = model.new_state(2, capacity=60)
        other.copy_row(1, fork, 2)
        assert other.lengths_B == [0, 8]
        close(model.read(bytes_BT[1:, 10:], other)[1], expected[2])
        assert torch.equal(model.read(bytes_BT[:, 10:], fork), expected)


def test_a_state_of_another_model_or_none_is_refused():
    saved = make().new_state().save()
    for config in (replace(CONFIG, global_model=replace(GLOBAL, dim=32)), replace(CONFIG, patch=2)):
        with pytest.raises(Incompatible):
            MegabyteState.restore(saved, config)
    for other in (b"", saved[:-9], make().global_model.new_state().save()):
        with pytest.raises(Corrupt):
            MegabyteState.restore(other, CONFIG)


def test_a_session_takes_the_bytes_of_its_patches():
    state = make().new_state(2, capacity=400)
    per_place = 2 * 2 * 2 * 4 * 8  # layers, keys and values, heads, width, float64
    assert state.of_patches.num_bytes == 2 * per_place * (400 // 4 + 1)
    assert state.of_bytes.num_bytes == 2 * per_place * 8
    own = 2 * (4 * 8 + 4 * 16 * 8 + 256 * 8)  # bytes, vectors, scores
    assert state.num_bytes == state.of_patches.num_bytes + state.of_bytes.num_bytes + own


def test_every_parameter_learns(model):
    model.zero_grad()
    model.loss(drawn()).backward()
    unused = {"global_model.head.weight"}  # tied to the vector before the first patch
    named = {name: parameter for name, parameter in model.named_parameters() if name not in unused}
    without = [name for name, parameter in named.items() if parameter.grad is None or not parameter.grad.any()]
    assert not [name for name in without if ".experts." not in name], without


def test_a_model_learns_a_text_and_writes_it():
    torch.manual_seed(0)
    shape = {"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "ff_dim": 32}
    model = Megabyte(
        MegabyteConfig(
            4, replace(GLOBAL, **shape, head_dim=0, rotary_dim=0, context_length=32),
            replace(LOCAL, **shape, head_dim=0, rotary_dim=0),
        )
    )  # fmt: skip
    text = b"The patch is read as one, its bytes one by one. "
    fit(model, lambda step: model.loss(torch.tensor([list(text)])), num_steps=80, learning_rate=1e-2)
    assert model.generate(num_bytes=len(text), temperature=0) == text
    assert model.generate(text[:9], num_bytes=20, temperature=0) == text[9:29]
    state = model.new_state()
    assert model.generate(text[:5], num_bytes=6, temperature=0, state=state) == text[5:11]
    assert model.generate(num_bytes=7, temperature=0, state=state) == text[11:18]
    assert state.lengths_B == [18]
    wild = [model.generate(num_bytes=8, temperature=9.0, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert wild[0] == wild[1] != wild[2]


def test_what_does_not_fit_is_refused():
    for changes, message in (
        ({"patch": 3}, "16 wide does not divide into 3 bytes"),
        ({"patch": 0}, "patch"),
        ({"global_model": replace(GLOBAL, vocab_size=2)}, "a vocabulary of 2; expected 1"),
        ({"local_model": replace(LOCAL, context_length=7)}, "context is 7; expected two patches of 4"),
        ({"local_model": replace(LOCAL, vocab_size=40)}, "a vocabulary of 40; expected 256, the values of a byte"),
        ({"local_model": replace(LOCAL, stack="exits")}, "local_model has a stack of exits"),
        ({"global_model": replace(GLOBAL, stack="exits")}, "global_model has a stack of exits"),
    ):
        with pytest.raises(InvalidInput, match=message):
            replace(CONFIG, **changes)
    model = make()
    state = model.new_state(capacity=9)
    model.read(drawn(1, 10), state)
    before = state.save()
    with pytest.raises(InvalidInput, match="2 bytes do not fit into the places left, 1 bytes"):
        model.read(drawn(1, 2), state)
    assert state.save() == before
    with pytest.raises(InvalidInput, match="60 bytes do not fit into the places left, 47 bytes"):
        model.generate(b"a" * 60, num_bytes=1)
    with pytest.raises(InvalidInput, match="49 bytes do not fit into 12 patches of 4"):
        model.predict(drawn(1, 49))
    with pytest.raises(InvalidInput, match="temperature"):
        model.generate(num_bytes=1, temperature=-1)


def test_bytes_may_have_the_dtype_of_bytes():
    model, bytes_BT = make(), drawn()
    for read in (model.predict, model.loss, lambda each: model.read(each, model.new_state(3))):
        assert torch.equal(read(bytes_BT.to(torch.uint8)), read(bytes_BT))


def test_a_folder_holds_the_model(tmp_path, model):
    model.save(tmp_path)
    loaded = Megabyte.load(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded.predict(drawn()), model.predict(drawn()))


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(NotFound):
        Megabyte.load(tmp_path)
    make().save(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    for changes, error in (({"model_type": "memlm-decisions"}, Incompatible), ({"patch": 2}, Corrupt)):
        (tmp_path / "config.json").write_text(json.dumps({**given, **changes}))
        with pytest.raises(error):
            Megabyte.load(tmp_path)
