"""A window given to a plain model: it is the model with that window in its file, and reads texts of any length."""

import json
import shutil

import pytest
import torch

from memlm.errors import InvalidInput
from memlm.language_model import LanguageModel, load
from memlm.model.config import NUM_SINKS, ModelConfig
from memlm.model.files.checkpoint import load_checkpoint

WINDOW = 11


@pytest.fixture(scope="module")
def written(model_folder, tmp_path_factory):
    """The model with the window in its file."""
    folder = tmp_path_factory.mktemp("windows") / "model"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"windows": [WINDOW] * config["num_layers"], "num_sinks": NUM_SINKS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_it_is_the_model_with_that_window_in_its_file(model_folder, written):
    given, expected = load_checkpoint(model_folder, attention_window=WINDOW), load_checkpoint(written)
    assert given.decoder.config == expected.decoder.config
    tokens_1T = torch.arange(200)[None] % 90
    with torch.inference_mode():
        assert torch.equal(given.decoder(tokens_1T)[0], expected.decoder(tokens_1T)[0])


def test_within_the_window_it_is_the_plain_model(model_folder):
    tokens_1T = torch.arange(WINDOW)[None] % 90
    with torch.inference_mode():
        given, plain = (
            load_checkpoint(model_folder, attention_window=window).decoder(tokens_1T)[0] for window in (WINDOW, None)
        )
    torch.testing.assert_close(given, plain, atol=1e-5, rtol=1e-5)


def test_a_session_goes_beyond_the_context_in_bounded_ram(model_folder):
    with load(model_folder, attention_window=WINDOW) as lm, lm.session() as session, lm.session() as other:
        ids = [number % 90 for number in range(300)]
        for begin in range(0, 300, 100):
            session.append(token_ids=ids[begin : begin + 100])
        one = lm.engine.sessions._sessions[session.name]
        session.append(token_ids=ids[:120])
        assert one.state.num_tokens == 420
        assert one.state.num_bytes < 4 * 2 * 2 * 2 * 8 * 2 * (WINDOW + NUM_SINKS + 64) + 1024
        other.append(token_ids=[*ids, *ids[:120]])
        texts = [list(each.generate(temperature=0, max_tokens=8)) for each in (session, other)]
    assert [token.id for token in texts[0]] == [token.id for token in texts[1]]


@pytest.mark.parametrize("window", [0, -3, 45, 1000])
def test_a_window_beyond_the_context_is_refused(model_folder, window):
    with pytest.raises(InvalidInput, match="expected 1 to 44"):
        load_checkpoint(model_folder, attention_window=window)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"xl_length": 8}, "memory"),
        ({"positions": "learned"}, "learned"),
        ({"local_rope_theta": 100.0, "windows": [8, 0]}, "turn otherwise"),
    ],
)
def test_models_that_cannot_have_one_are_refused(model_folder, fields, reason):
    config = {**load_checkpoint(model_folder).decoder.config.as_dict(), **fields}
    with pytest.raises(InvalidInput, match=reason):
        ModelConfig.from_dict(config).with_attention_window(9)


def test_a_smaller_window_of_a_layer_stays(model_folder):
    config = {**load_checkpoint(model_folder).decoder.config.as_dict(), "windows": [5, 0]}
    assert ModelConfig.from_dict(config).with_attention_window(9).windows == (5, 9)


def test_a_text_is_longer_than_the_context(model_folder):
    lm = LanguageModel(load_checkpoint(model_folder, attention_window=WINDOW))
    assert len(lm.generate("the memory", temperature=0.9, seed=1, max_tokens=150, stop=[]).result().tokens) > 40
