"""Devices and types: decoders, memories and steps of a batch on a device that is not the host's."""

import numpy as np
import pytest
import torch
from decoders import ALL, make, sampled
from fake_device import fake_device, fake_gpu, on_fake_gpu
from texts import make_text

from memlm.api.params import GenerateRequest, RetrievalParams
from memlm.base.steps import run_steps
from memlm.errors import InvalidInput
from memlm.generation.batch import Batch
from memlm.generation.engine import Engine
from memlm.generation.likelihood import loglikelihood
from memlm.index.store.datastore import Datastore
from memlm.indexing.quality import check_keys
from memlm.language_model import LanguageModel, load
from memlm.model import Decoder, DecoderState, device
from memlm.model.device import dtype_of, fastest_device, has_fast_bfloat16
from memlm.model.files.checkpoint import load_checkpoint
from memlm.retrieval.encoder import Encoder, document_windows


@pytest.mark.parametrize("name", sampled(ALL))
def test_a_decoder_and_its_memories_stay_on_the_device(name):
    decoder = Decoder(ALL[name])
    with fake_device() as host, torch.inference_mode():
        on_fake_gpu(decoder)
        assert decoder.device == fake_gpu()
        state = decoder.new_state(batch_size=2)
        for size, new_B in ((7, [7, 4]), (1, [1, 1]), (5, [5, 5]), (1, [1, 1])):
            hidden_BTD, keys_BTD = decoder(torch.zeros(2, size, dtype=torch.int64), state, new_B=new_B)
            logprobs_BTV = decoder.logprobs(hidden_BTD)
        decoder.keys(torch.zeros(1, 20, dtype=torch.int64))
        assert {each.device.type for each in (hidden_BTD, keys_BTD, logprobs_BTV, state.cache_L2BGSd)} == {"fakegpu"}
    assert host.crossings == []


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_step_brings_the_keys_of_all_sequences_to_the_host_at_once(model_folder, store_folder, temperature):
    checkpoint = load_checkpoint(model_folder, trainable=True)  # not packed, which only processors are
    engine = Engine(checkpoint, [store_folder])
    with fake_device() as host:
        on_fake_gpu(checkpoint.decoder)
        batch = Batch(checkpoint, max_sequences=3)
        for length in (3, 9, 5):
            options = {"max_tokens": 4, "temperature": temperature, "lam": 0.5}
            request = GenerateRequest.of("memory " * length, options)
            run_steps(batch.add(run_steps(engine.start(request))))
        config = checkpoint.decoder.config
        for _ in range(3):  # the first one reads the prompts
            host.crossings.clear()
            assert [sequence.failure for sequence in batch.step()] == [None] * 3
            assert host.crossings == [(3, config.vocab_size), (3, config.dim)]
    engine.stores.close()


def test_windows_leave_the_device_as_keys_and_as_predictions(model_folder):
    decoder = load_checkpoint(model_folder, trainable=True).decoder
    tokens_n = np.arange(1, 200) % 290
    windows = list(document_windows(decoder, tokens_n, 0))
    with fake_device():
        on_fake_gpu(decoder)
        keys = Encoder(decoder).keys(windows)
        predictions = Encoder(decoder).predictions(windows, hidden=True)
    assert sum(map(len, keys)) == len(tokens_n) == sum(len(each.logprobs_N) for each in predictions)


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_a_continuation_is_mixed_on_the_host(model_folder, store_folder, lam):
    checkpoint = load_checkpoint(model_folder, trainable=True)
    with LanguageModel(checkpoint, [store_folder]) as lm:
        retriever = lm.engine.stores.retriever(RetrievalParams(lam=lam))
        with fake_device() as host:
            on_fake_gpu(checkpoint.decoder)
            loglikelihood(checkpoint, [1, 2, 3], [4, 5], retriever)
    config = checkpoint.decoder.config
    assert host.crossings == [(2, config.vocab_size), (2, config.dim)]


def test_a_saved_state_comes_back_in_the_type_and_on_the_device_of_the_model():
    decoder = make(ALL["everything"]).float()
    state = decoder.new_state()
    with torch.inference_mode():
        decoder(torch.arange(20)[None], state)
        restored = DecoderState.restore(state.save(), decoder.config, dtype=torch.bfloat16)
        assert restored.cache_L2BGSd.dtype == torch.bfloat16
        assert torch.equal(restored.cache_L2BGSd, state.cache_L2BGSd.bfloat16())
        decoder.bfloat16()(torch.arange(5)[None], restored)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_store_of_one_type_is_read_and_checked_under_another(model_folder, store_folder, dtype):
    with load(model_folder, [store_folder], dtype="float32") as lm:
        expected = text_and_place(lm, make_text(3, 8))[1]
    checkpoint = load_checkpoint(model_folder, dtype=dtype)
    with LanguageModel(checkpoint, [store_folder]) as lm:
        assert text_and_place(lm, make_text(3, 8))[1] == expected
    with Datastore.open(store_folder) as datastore:
        assert check_keys(datastore.snapshot, checkpoint).problems("store") == []


def test_auto_is_the_gpu_and_what_it_is_fast_at(monkeypatch):
    monkeypatch.setattr(device, "has_fast_bfloat16", has_fast_bfloat16)
    fast = {"cpu": False}
    monkeypatch.setattr(device.cpu, "has_fast_bfloat16", lambda: fast["cpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: fast["cuda"])
    assert fastest_device() == torch.device("cuda")
    for has_it, expected in ((True, torch.bfloat16), (False, torch.float32)):
        fast |= {"cpu": has_it, "cuda": has_it}
        assert dtype_of("auto", torch.device("cuda")) == expected
        assert dtype_of("auto", torch.device("cpu")) == expected
    assert dtype_of("auto", torch.device("mps")) == torch.float32
    assert dtype_of("float16", torch.device("cpu")) == torch.float16


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:1", "", "CUDA"])
def test_what_names_no_device_is_refused(name, model_folder):
    with pytest.raises(InvalidInput, match="expected auto, cpu, cuda, cuda:N or mps"):
        load_checkpoint(model_folder, device=name)


def test_a_device_that_is_not_there_and_an_unknown_type_are_refused(model_folder):
    with pytest.raises(InvalidInput, match=r"finds \d+ of that kind on this machine: choose auto or cpu"):
        load_checkpoint(model_folder, device="cuda:4096")
    with pytest.raises(InvalidInput, match=r"dtype.*float16"):
        load_checkpoint(model_folder, dtype="int3")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gpu_gives_the_text_and_the_keys_of_the_processor(model_folder, store_folder, dtype):
    prompt = make_text(3, 8)
    with load(model_folder, [store_folder], device="cpu", dtype="float32") as lm:
        expected, expected_place = text_and_place(lm, prompt)
    with load(model_folder, [store_folder], device="cuda", dtype=dtype) as lm:
        assert lm.checkpoint.decoder.device.type == "cuda"
        text, place = text_and_place(lm, prompt)
    assert place == expected_place
    assert dtype != "float32" or text == expected


def text_and_place(lm: LanguageModel, prompt: str) -> tuple[str, tuple[str, int]]:
    (nearest,) = lm.search(None, prompt, k=1)
    text = "".join(token.text for token in lm.generate(prompt, max_tokens=12, temperature=0))
    return text, (nearest.document_id, nearest.token_offset)
