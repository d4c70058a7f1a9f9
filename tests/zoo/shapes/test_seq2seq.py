"""An encoder-decoder answers sources, as `transformers` does on the same weights."""

import pytest
import torch
from encoders import change_json
from zoo.shapes.seq2seq_models import of_transformers, save_t5

import memlm
from memlm.api.generation import FinishReason
from memlm.errors import Incompatible, InvalidInput
from memlm.zoo.shapes.seq2seq import ROWS_AT_ONCE, Seq2Seq

SOURCE = "one red dog three"
IDS = [3, 6, 8, 5, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_t5("1.1", tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def model(folder) -> Seq2Seq:
    return memlm.Seq2Seq.load(folder, dtype="float32")


def test_greedy_answers_are_those_of_transformers(folder, model):
    theirs = of_transformers(folder)
    for seed in range(4):
        ids = torch.randint(3, 10, (7,), generator=torch.Generator().manual_seed(seed)).tolist()
        with torch.inference_mode():
            # Its cache has a layer for each of the encoder's.
            greedy = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, use_cache=False)
        expected = greedy[0, 1:].tolist()
        assert list(model.generate(ids, max_tokens=12).token_ids) == expected


def test_a_text_is_read_in_the_template_and_an_answer_is_text_without_special_tokens(model):
    answer = model.generate(SOURCE, max_tokens=6)
    assert answer == model.generate(IDS, max_tokens=6, seed=answer.seed)
    assert str(answer) == answer.text == model.checkpoint.tokenizer.decode(answer.token_ids)
    assert model.checkpoint.tokenizer.decode([3, 10, 6, 1]) == "one red"
    assert (model.sentinel_id(0), model.sentinel_id(3)) == (10, 13)


def test_logprobs_are_those_of_the_answer_read_as_a_whole(model):
    answer, inner = model.generate(IDS, max_tokens=6), model.checkpoint.model
    with torch.inference_mode():
        state = inner.new_state(sources_B=inner.encode(torch.tensor([IDS])))
        hidden_BTD, _ = inner(torch.tensor([[0, *answer.token_ids[:-1]]]), state)
        expected = inner.logprobs(hidden_BTD[0])[range(len(answer.token_ids)), answer.token_ids]
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)


def test_sources_in_company_are_answered_as_if_they_were_alone(model):
    sources = [[3 + n % 7, *range(4, 4 + n % 5)] for n in range(ROWS_AT_ONCE + 3)]
    options = {"max_tokens": 5, "temperature": 0.7, "top_k": 20, "seed": 5}
    together = model.generate(sources, **options)
    assert [each.token_ids for each in together] == [model.generate(each, **options).token_ids for each in sources]
    assert len({each.token_ids for each in together}) > 5


def test_an_answer_ends_at_its_end_or_at_its_length(folder, tmp_path):
    model = Seq2Seq.load(folder, dtype="float32")
    first = model.generate(IDS, max_tokens=6)
    assert (first.reason, len(first.token_ids)) == (FinishReason.LENGTH, 6)
    save_t5("1.1", tmp_path / "t5")
    change_json(tmp_path / "t5" / "config.json", eos_token_id=[1, first.token_ids[2]])
    ending = Seq2Seq.load(tmp_path / "t5", dtype="float32")
    answer = ending.generate(IDS, max_tokens=6)
    end = first.token_ids.index(first.token_ids[2]) + 1
    assert (answer.reason, answer.token_ids) == (FinishReason.END, first.token_ids[:end])
    together = ending.generate([IDS, [4, 9]], max_tokens=6)  # one row ends before the other
    assert [each.token_ids for each in together] == [answer.token_ids, ending.generate([4, 9], max_tokens=6).token_ids]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (SOURCE, {"stores": ["docs"]}, "no option 'stores'; .*Datastores, sessions"),
        (SOURCE, {"session": "mine"}, "no option 'session'"),
        (SOURCE, {"temperature": -1}, "temperature is -1"),
        (SOURCE, {"max_tokens": 513}, "max_tokens is 513; at most 512 fit"),
        ("one " * 512, {}, "513 tokens of a source do not fit"),
        ([], {}, "holds no token ids"),
        ([120], {}, "outside 0 to 119"),
        (7, {}, "expected a text, or token ids"),
    ],
)
def test_what_it_cannot_do_is_refused_in_words(model, source, options, message):
    with pytest.raises(InvalidInput, match=message):
        model.generate(source, **options)


def test_the_other_faces_of_memlm_say_what_to_load_instead(folder, model):
    with pytest.raises(Incompatible, match=r"encoder-decoder.*memlm\.Seq2Seq\.load"):
        memlm.load(folder)
    with pytest.raises(InvalidInput, match="no token '<extra_id_4>'"):
        model.sentinel_id(4)
