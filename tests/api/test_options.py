"""The options of generate, chat and score: one vocabulary, typed, and a clear error for what is no option."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from memlm.api import options
from memlm.api.params import GenerateRequest, RetrievalParams, SamplingParams, StreamRequest, parse_drafts
from memlm.api.tracing import TraceRequest
from memlm.errors import InvalidInput
from memlm.language_model import load


def names_of(record: type) -> set[str]:
    return {field.name for field in fields(record)}


def test_the_typed_options_are_the_fields_of_the_requests():
    sampling, retrieval = names_of(SamplingParams), names_of(RetrievalParams)
    stream = names_of(StreamRequest) - {"sampling", "retrieval"}
    assert set(options.SamplingOptions.__annotations__) == sampling
    assert set(options.RetrievalOptions.__annotations__) == retrieval
    assert set(options.StreamOptions.__annotations__) == sampling | retrieval | stream
    assert set(options.ChatOptions.__annotations__) == sampling | retrieval | stream | {"num_passages"}
    assert set(options.TurnOptions.__annotations__) == set(options.ChatOptions.__annotations__) - {"session"}
    trace = {each.name for each in fields(TraceRequest)}
    assert set(options.TraceOptions.__annotations__) == trace - {"text", "store"}
    assert set(options.GenerateOptions.__annotations__) == sampling | retrieval | stream | {"prompt_token_ids"}
    assert set(options.ContinueOptions.__annotations__) == set(options.GenerateOptions.__annotations__) - {"session"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; expected a number"),
        ({"temperature": []}, "temperature is []; expected a number"),
        ({"max_tokens": "3"}, "max_tokens is '3'; expected a whole number"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; expected a whole number"),
        ({"seed": 1.0}, "seed is 1.0; expected a whole number"),
        ({"neighbors": "all"}, "neighbors is 'all'; expected a whole number"),
        ({"lam": "0.5"}, "lam is '0.5'; expected a number"),
        ({"stop": 5}, "stop is 5; expected a string"),
        ({"stop": [5]}, "stop is (5,); expected strings"),
        ({"stores": "yp"}, "stores is 'yp'; expected names in a list"),
        ({"stores": 5}, "stores is 5; expected names in a list"),
        ({"drafts": 65}, "drafts is 65; expected between 0 and 64"),
        ({"drafts": "auto"}, "drafts is 'auto'; expected a whole number"),
        ({"draft": ["a"]}, "draft is of the type list; expected a text"),
        ({"draft": "a\0"}, "draft has a NUL at character 1"),
        ({"draft": "a", "early_exit": True}, "draft is given with early_exit, which drafts nothing"),
        ({"drafts": 4, "early_exit": True}, "drafts is given with early_exit, which drafts nothing"),
        ({"num_speculative_tokens": 5}, "did you mean drafts?"),
        ({"max_new_tokens": 5}, "did you mean max_tokens?"),
        ({"temprature": 5}, "did you mean temperature?"),
        ({"xyzzy": 5}, "unknown option 'xyzzy'; the options are"),
    ],
)
def test_a_wrong_option_is_named_with_what_was_expected(given, says):
    with pytest.raises(InvalidInput) as caught:
        GenerateRequest.of("a", given)
    assert says in str(caught.value)
    assert caught.value.field == next(iter(given))


def test_early_exit_goes_with_drafts_that_are_left_open_or_off():
    for given in ({}, {"drafts": None}, {"drafts": 0}, {"draft": ""}):
        assert GenerateRequest.of("a", {"early_exit": True, **given}).early_exit


@pytest.mark.parametrize(("said", "drafts"), [("auto", None), ("off", 0), ("0", 0), ("12", 12)])
def test_drafts_are_auto_off_or_a_number_on_the_command_line(said, drafts):
    assert parse_drafts(said) == drafts


@pytest.mark.parametrize("said", ["", "on", "-1", "1.5"])
def test_another_word_for_drafts_is_refused(said):
    with pytest.raises(InvalidInput, match="expected auto, off, or 0 to 64") as caught:
        parse_drafts(said)
    assert caught.value.field == "drafts"


def test_numbers_of_other_libraries_and_none_are_options():
    request = GenerateRequest.of("a", {"temperature": np.float32(0.5), "max_tokens": np.int64(3), "stop": None})
    assert request.sampling == SamplingParams(temperature=0.5, max_tokens=3)
    assert GenerateRequest.of("a", {"stop": "b"}).sampling.stop == ("b",)


def test_the_parameters_of_sampling_take_stop_strings_in_a_tuple():
    with pytest.raises(InvalidInput, match="stop is 'end'"):
        SamplingParams(stop="end")  # type: ignore[arg-type]


@pytest.mark.parametrize("stores", ["yp", Path("yp")])
def test_one_folder_in_place_of_a_list_of_datastores_is_refused(model_folder, stores):
    with pytest.raises(InvalidInput, match=r"stores is 'yp'; expected folders in a list, as \['yp'\]"):
        load(model_folder, stores)
