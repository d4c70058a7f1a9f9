"""Models of other families, against `transformers` on the same weights."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from other_families import CONFIGS, save_as_others_do
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound
from memlm.language_model import load
from memlm.model import Decoder
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint

ATOL = 1e-4  # float32; measured: at most 2e-5, for logits of a standard deviation of 1.4
# bfloat16 has 8 bits: root mean square differences from float32 were 0.013 to 0.048 here, 0.014 to 0.059 there.
BFLOAT16_RMS, BFLOAT16_RATIO = 0.06, 1.15
STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260k"


@pytest.fixture(params=CONFIGS, scope="module")
def foreign(request, tmp_path_factory, tokenizer) -> Path:
    return save_as_others_do(request.param, tmp_path_factory.mktemp("foreign"), tokenizer)


@pytest.fixture
def gpt2(tmp_path, tokenizer) -> Path:
    return save_as_others_do("gpt2", tmp_path / "gpt2", tokenizer)


def theirs(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def logits_of(decoder: Decoder, tokens_BT: torch.Tensor, state=None, **more) -> torch.Tensor:
    return decoder.logits(decoder(tokens_BT, state, **more)[0]).float()


def some_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(300, shape, generator=torch.Generator().manual_seed(3))


def test_logits_equal_those_of_transformers_also_past_the_sliding_window(foreign):
    tokens_BT = some_tokens(2, 40)
    with torch.inference_mode():
        expected_BTV = theirs(foreign, torch.float32)(tokens_BT).logits
        ours_BTV = logits_of(load_checkpoint(foreign).decoder, tokens_BT)
    assert expected_BTV.std() > 1
    torch.testing.assert_close(ours_BTV, expected_BTV, atol=ATOL, rtol=0)


def test_in_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(foreign):
    tokens_BT = some_tokens(2, 40)
    with torch.inference_mode():
        exact_BTV = theirs(foreign, torch.float32)(tokens_BT).logits
        their_error = theirs(foreign, torch.bfloat16)(tokens_BT).logits.float() - exact_BTV
        decoder = load_checkpoint(foreign, dtype=torch.bfloat16).decoder
        our_error = logits_of(decoder, tokens_BT) - exact_BTV
    if decoder.config.layers:  # experts of nearly equal scores change places at some tokens, other ones for each
        our_error, their_error = (error.square().mean(2).median().sqrt() for error in (our_error, their_error))
    assert 1e-3 < our_error.square().mean().sqrt() < BFLOAT16_RMS
    assert our_error.square().mean() < BFLOAT16_RATIO**2 * their_error.square().mean()


def test_with_a_cache_they_are_the_same(foreign):
    tokens_BT = some_tokens(2, 80)
    with torch.inference_mode():
        expected_BTV = theirs(foreign, torch.float32)(tokens_BT).logits
        decoder = load_checkpoint(foreign).decoder
        state, begin = decoder.new_state(batch_size=2), 0
        for size in (7, 1, 1, 30, 1, 40):
            ours_BTV = logits_of(decoder, tokens_BT[:, begin : begin + size], state)
            torch.testing.assert_close(ours_BTV, expected_BTV[:, begin : begin + size], atol=ATOL, rtol=0)
            begin += size


def test_in_batches_of_unequal_lengths_they_are_the_same(foreign):
    lengths, decoder = [5, 33, 12], load_checkpoint(foreign).decoder
    tokens_BT = some_tokens(3, 33)
    reference = theirs(foreign, torch.float32)
    with torch.inference_mode():
        state = decoder.new_state(batch_size=3)
        ours_BTV = logits_of(decoder, tokens_BT, state, new_B=lengths)
        more_BT = some_tokens(3, 4)
        later_BTV = torch.cat([logits_of(decoder, more_BT[:, [t]], state) for t in range(4)], dim=1)
        for row, length in enumerate(lengths):
            alone_BT = torch.cat([tokens_BT[row : row + 1, :length], more_BT[row : row + 1]], dim=1)
            expected_BTV = reference(alone_BT).logits
            got_BTV = torch.cat([ours_BTV[row : row + 1, :length], later_BTV[row : row + 1]], dim=1)
            torch.testing.assert_close(got_BTV, expected_BTV, atol=ATOL, rtol=0)


def test_trainable_weights_are_the_same_model(foreign):
    tokens_BT = some_tokens(1, 20)
    with torch.inference_mode():
        packed = logits_of(load_checkpoint(foreign).decoder, tokens_BT)
    plain = logits_of(load_checkpoint(foreign, trainable=True).decoder, tokens_BT)
    assert plain.requires_grad
    torch.testing.assert_close(plain.detach(), packed, atol=ATOL, rtol=0)


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model_type": "mamba"}, Incompatible, "'mamba'.*gpt2"),
        ({"activation_function": "swish"}, Incompatible, "swish"),
        ({"scale_attn_by_inverse_layer_idx": True}, Incompatible, "scale_attn_by_inverse_layer_idx"),
        ({"n_layer": 4}, Corrupt, r"h\.3\."),
        ({"n_layer": 2}, Corrupt, r"h\.2\."),
        ({"n_embd": 52}, Corrupt, "embedding.weight should be"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(gpt2, changes, error, says):
    change_config(gpt2, **changes)
    with pytest.raises(error, match=says):
        load_checkpoint(gpt2)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"model_type": "gemma3"}, "'gemma3'.*gemma3_text"),
        ("phi3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic'.*longrope"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}}, "longrope"),
    ],
)
def test_settings_of_a_family_that_this_version_lacks_are_refused_by_name(tmp_path, tokenizer, name, changes, says):
    folder = save_as_others_do(name, tmp_path / "m", tokenizer)
    change_config(folder, **changes)
    with pytest.raises(Incompatible, match=says):
        load_checkpoint(folder)


def test_the_old_spelling_of_gemmas_positions_is_read(tmp_path, tokenizer):
    folder = save_as_others_do("gemma3 scaling", tmp_path / "m", tokenizer)
    config = load_checkpoint(folder).decoder.config
    given = json.loads((folder / "config.json").read_text())
    rope = given.pop("rope_parameters")
    del given["layer_types"]
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": rope["full_attention"]["rope_theta"], "rope_local_base_freq": 300.0, "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps({**given, **old, "sliding_window_pattern": 2}))
    assert load_checkpoint(folder).decoder.config == config
    assert config.windows == (8, 0, 8, 0)


def test_phi3_with_longrope_reads_no_further_than_its_short_factors_hold(tmp_path, tokenizer):
    decoder = load_checkpoint(save_as_others_do("phi3 longrope", tmp_path / "m", tokenizer)).decoder
    assert decoder.config.context_length == 96
    with pytest.raises(InvalidInput, match="shorten the text"):
        decoder(some_tokens(1, 97))


def test_missing_surplus_and_misshapen_tensors_are_named(gpt2):
    weights = load_file(gpt2 / "model.safetensors")
    name = "transformer.h.1.mlp.c_fc.weight"
    for changed, says in (
        ({key: value for key, value in weights.items() if key != name}, name),
        ({**weights, "transformer.h.1.adapter": torch.zeros(2)}, "adapter"),
        ({**weights, name: weights[name].T.contiguous()}, name),
    ):
        save_file(changed, gpt2 / "model.safetensors")
        with pytest.raises(Corrupt, match=says):
            load_checkpoint(gpt2)


def test_names_without_the_familys_prefix_are_read_and_buffers_passed_over(gpt2):
    before = load_checkpoint(gpt2).decoder.weights()
    weights = load_file(gpt2 / "model.safetensors")
    weights = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    save_file({**weights, "h.0.attn.bias": torch.ones(1)}, gpt2 / "model.safetensors")
    after = load_checkpoint(gpt2).decoder.weights()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_missing_shard_is_named(tmp_path, tokenizer):
    folder = save_as_others_do("qwen2", tmp_path / "m", tokenizer)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(Corrupt, match=shards[1].name):
        load_checkpoint(folder)


def test_a_hub_id_without_a_network_is_not_found(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NotFound, match="hub"):
        load_checkpoint("nobody-at-all/no-such-model")


@pytest.fixture(scope="module")
def stories() -> Checkpoint:
    return load_checkpoint(STORIES)


@pytest.mark.skipif(not STORIES.is_dir(), reason="the shared checkpoint stories260k is not beside this checkout")
class TestStories:
    def test_its_greedy_text_is_known(self):
        with load(STORIES) as lm:
            stream = lm.generate("Once upon a time,", max_tokens=60, temperature=0)
            text = "".join(token.text for token in stream)
        assert text.startswith(
            " there was a little girl named Lily. She loved to play outside in the park."
            " One day, she saw a big, red ball."
        )

    def test_its_logits_and_tokens_are_those_of_transformers(self, stories):
        reference = AutoModelForCausalLM.from_pretrained(STORIES)
        their_tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(STORIES / "tokenizer.json"))
        text = "Once upon a time, in a café\nthere was  a 猫."
        tokens = stories.tokenizer.prompt(text)
        assert tokens == their_tokenizer(text).input_ids
        assert stories.tokenizer.decode(tokens, whole=True) == text
        with torch.inference_mode():
            expected_TV = reference(torch.tensor([tokens])).logits[0]
            ours_TV = logits_of(stories.decoder, torch.tensor([tokens]))[0]
        torch.testing.assert_close(ours_TV, expected_TV, atol=ATOL, rtol=0)

    def test_a_text_after_no_prompt_begins_without_a_space(self):
        with load(STORIES) as lm:
            tokens = list(lm.generate("", max_tokens=8, temperature=0))
        assert not tokens[0].text.startswith(" ")
        assert "".join(token.text for token in tokens).startswith("Once upon")

    def test_it_builds_and_asks_a_datastore(self, tmp_path):
        from memlm.data.corpus import Corpus
        from memlm.indexing.build import build_index

        (tmp_path / "a.txt").write_text("Lily saw a big red ball. Tom saw a small blue car.\n" * 20)
        report = build_index(STORIES, Corpus([tmp_path / "a.txt"]), tmp_path / "store")
        with load(STORIES, [tmp_path / "store"]) as lm:
            found = lm.search(None, "Tom saw a small blue", k=4)
            assert report.entries == len(lm.tokenize((tmp_path / "a.txt").read_text()))
        assert {neighbor.token_text for neighbor in found} == {" c"}


def test_a_model_of_ours_made_from_theirs_keeps_its_special_tokens(tmp_path):
    if not STORIES.is_dir():
        pytest.skip("the shared checkpoint stories260k is not beside this checkout")
    from memlm.model.files.checkpoint import save_checkpoint

    stories = load_checkpoint(STORIES)
    save_checkpoint(tmp_path / "ours", stories.decoder, stories.tokenizer)
    again = load_checkpoint(tmp_path / "ours")
    assert again.tokenizer.special == stories.tokenizer.special
    tokens_BT = some_tokens(1, 12)
    with torch.inference_mode():
        assert torch.equal(logits_of(again.decoder, tokens_BT), logits_of(stories.decoder, tokens_BT))


def test_a_folder_of_theirs_is_copied_whole(gpt2, tmp_path):
    copy = Path(shutil.copytree(gpt2, tmp_path / "copy"))
    assert load_checkpoint(copy).fingerprint == load_checkpoint(gpt2).fingerprint


def test_generation_config_is_honoured_where_nothing_else_is_asked(gpt2):
    generation_config = {"do_sample": True, "temperature": 0.4, "top_k": 2, "top_p": 0.9, "eos_token_id": [0, 7]}
    (gpt2 / "generation_config.json").write_text(json.dumps(generation_config))
    checkpoint = load_checkpoint(gpt2)
    assert (checkpoint.sampling.temperature, checkpoint.sampling.top_k) == (0.4, 2)
    assert checkpoint.tokenizer.end_ids == (0, 7)
    with load(gpt2) as lm:
        given = lm.generate("the memory", max_tokens=20, seed=3, temperature=0.4, top_k=2, top_p=0.9)
        other = lm.generate("the memory", max_tokens=20, seed=3, temperature=1.0, top_k=300, top_p=1.0)
        texts = [
            "".join(token.text for token in each)
            for each in (lm.generate("the memory", max_tokens=20, seed=3), given, other)
        ]
    assert texts[0] == texts[1] != texts[2]
    (gpt2 / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": -1}))
    with pytest.raises(Incompatible, match="temperature"):
        assert load_checkpoint(gpt2).sampling


def test_it_generates_past_its_window_as_transformers_does(tmp_path, tokenizer):
    folder = save_as_others_do("mistral", tmp_path / "m", tokenizer)
    prompt = "the memory of a model can be read and edited"
    with load(folder) as lm:
        tokens = [token.id for token in lm.generate(prompt, max_tokens=30, temperature=0)]
        ids = torch.tensor([lm.checkpoint.tokenizer.prompt(prompt)])
    expected = theirs(folder, torch.float32).generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert tokens == [token for token in expected[0, ids.shape[1] :].tolist() if token != 0]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_loading_takes_little_more_memory_than_the_weights_in_use(tmp_path, tokenizer, stored):
    """Weights are packed as they are read, and the embedding that is also the head stays in the file."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=30_000, hidden_size=512, intermediate_size=2048, num_hidden_layers=9, num_attention_heads=8,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    large = tmp_path / "large"
    model = AutoModelForCausalLM.from_config(config).to(stored)
    model.save_pretrained(large)
    tokenizer.save(large)
    small = save_as_others_do("llama", tmp_path / "small", tokenizer)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    script = (
        "import sys; from pathlib import Path; from memlm.model.files.checkpoint import load_checkpoint\n"
        "def of(name): return int(Path('/proc/self/status').read_text().split(name)[1].split()[0]) * 1024\n"
        "first = load_checkpoint(sys.argv[1])  # loads the libraries, which is not what is measured\n"
        "Path('/proc/self/clear_refs').write_text('5')  # the peak starts anew\n"
        "before = of('VmRSS:'); kept = load_checkpoint(sys.argv[2], dtype='float32'); print(of('VmHWM:') - before)"
    )
    command = [sys.executable, "-c", script, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert size > 200e6
    assert 0.7 * size < int(done.stdout) < 1.3 * size


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "llama", "llama biases"])
def test_weights_stored_in_half_of_float32_are_read_exactly(tmp_path, tokenizer, name, stored):
    """The embedding stays in the file, and its rows are converted when they are looked up."""
    folder = save_as_others_do(name, tmp_path / "m", tokenizer)
    AutoModelForCausalLM.from_pretrained(folder).to(stored).save_pretrained(folder)
    tokens_BT = some_tokens(2, 40)
    decoder = load_checkpoint(folder, dtype="float32").decoder
    trainable = load_checkpoint(folder, dtype="float32", trainable=True).decoder
    with torch.inference_mode():
        expected_BTV = theirs(folder, torch.float32)(tokens_BT).logits
        torch.testing.assert_close(logits_of(decoder, tokens_BT), expected_BTV, atol=ATOL, rtol=0)
    assert decoder.dtype == torch.float32
    assert decoder.num_parameters == trainable.num_parameters
    assert torch.equal(decoder.output_embedding_VD, trainable.output_embedding_VD)
    assert decoder.weights().keys() == trainable.weights().keys()
    assert all(torch.equal(tensor, trainable.weights()[each]) for each, tensor in decoder.weights().items())


def test_t5_buckets_and_alibi_slopes_are_those_of_transformers():
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.t5.modeling_t5 import T5Attention

    from memlm.model.positions import alibi_slopes, t5_buckets

    distances = torch.arange(2000)
    for buckets, furthest in ((32, 128), (8, 12), (16, 1000)):
        expected = T5Attention._relative_position_bucket(
            -distances, bidirectional=False, num_buckets=buckets, max_distance=furthest
        )
        assert torch.equal(t5_buckets(distances, buckets, furthest), expected)
    for heads in (1, 2, 4, 6, 8, 12, 20):
        slopes_H = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), slopes_H)
