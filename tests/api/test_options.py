"""The options of generate, chat and score: one vocabulary, typed, and a clear error for what is no option."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlm.api import options
from memlm.api.datastores import DeleteDocumentsRequest, NewDocument
from memlm.api.params import GenerateRequest, RetrievalParams, SamplingParams, StreamRequest, parse_drafts
from memlm.api.tracing import TraceRequest
from memlm.data.corpus import Corpus, Document
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel, load
from memlm.model.files.adapter_files import attach_adapters
from memlm.prompting.chains import choose, selection_inference
from memlm.zoo.demix.model_mixture import ModelMixture


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
        ({"stop": 5}, "stop is 5; expected texts in a list"),
        ({"stop": [5]}, "stop holds 5; expected texts"),
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


def wrong_lists(lm: LanguageModel, given: Any) -> dict[str, Callable[[], object]]:
    """Calls that take a list, by the field that the error names."""
    return {
        "document_ids": lambda: lm.delete_documents(given),
        "stores": lambda: lm.generate("a", stores=given),
        "prompts": lambda: lm.generate_batch(given),
        "passages": lambda: lm.answer("a", passages=given),
        "corpus": lambda: Corpus(given),
        "roots": lambda: Corpus(["."], roots=given),
        "documents": lambda: Corpus([], documents=given),
        "adapters": lambda: attach_adapters(lm.checkpoint, given),
        "shards": lambda: LanguageModel(lm.checkpoint, shards=given),
        "models": lambda: ModelMixture(given),
        "facts": lambda: selection_inference(lm, "why?", given),
        "choices": lambda: choose(lm, "a", given),
        "texts": lambda: Tokenizer.train(given, vocab_size=300),
        "token_ids": lambda: lm.detokenize(given),
    }


@pytest.mark.parametrize("given", ["12", 5])
def test_one_text_in_place_of_a_list_is_refused_wherever_a_list_is_taken(lm, given):
    """A text is a sequence of its characters: `delete_documents("12")` must not delete "1" and "2"."""
    for field, call in wrong_lists(lm, given).items():
        with pytest.raises(InvalidInput, match=" in a list") as caught:
            call()
        assert caught.value.field in (field, "prompt_token_ids")


def test_a_deletion_by_one_text_deletes_nothing(tmp_path, model_folder):
    documents = [Document(str(number), f"text number {number} of all") for number in range(13)]
    build_index(model_folder, documents, tmp_path / "store", keys="none")
    with load(model_folder, [tmp_path / "store"]) as lm, Datastore.open(tmp_path / "store") as store:
        for delete in (lm.delete_documents, store.delete, lambda ids: DeleteDocumentsRequest.of(ids, None)):
            for wrong, says in (
                ("12", "is '12'; expected ids of documents in a list, as \\['12'\\]"),
                ([5], "holds 5"),
            ):
                with pytest.raises(InvalidInput, match=f"document_ids {says}"):
                    delete(wrong)
        assert lm.stores[0].num_documents == 13
        assert lm.delete_documents(["12"]).num_documents == 1


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("stop", lambda lm: lm.generate("a", stop=[5])),
        ("exclude_documents", lambda lm: lm.generate("a", exclude_documents=[None])),
        ("exclude_documents", lambda lm: lm.find_passages("a", exclude_documents=[None])),
        ("documents", lambda lm: lm.search(None, "a", documents=[5])),
        ("documents", lambda lm: lm.trace("a text", documents=5)),
        ("where", lambda lm: lm.search(None, "a", where=[None])),
        ("passage_stores", lambda lm: lm.answer("a", passage_stores=5)),
        ("corpus", lambda lm: Corpus([None])),
        ("glob", lambda lm: Corpus(["."], glob=["*.md"])),
        ("store", lambda lm: lm.search(["store"], "a")),
        ("documents", lambda lm: lm.remember(5)),
        ("documents.text", lambda lm: lm.remember([NewDocument("a", None)])),
        ("documents.id", lambda lm: lm.remember([NewDocument(5, "a")])),
        ("documents.title", lambda lm: lm.remember([NewDocument("a", "a", None)])),
        ("documents.metadata", lambda lm: lm.remember([NewDocument("a", "a", "", ["x"])])),
    ],
)
def test_an_item_of_a_list_that_is_no_text_is_refused_by_name(lm, field, call):
    with pytest.raises(InvalidInput, match=r"holds|is|has") as caught:
        call(lm)
    assert caught.value.field == field


def test_one_text_is_a_list_of_one_where_that_is_the_contract(lm):
    assert GenerateRequest.of("a", {"stop": "end"}).sampling.stop == ("end",)
    named = lm.search(None, "memory", k=3, documents="doc-1.txt")
    assert {each.document_id for each in named} == {"doc-1.txt"}
    assert lm.find_passages("the memory", exclude_documents="doc-*") == ()


def test_whole_numbers_of_any_size_become_floats_or_are_refused():
    """A tensor takes no whole number beyond 64 bits: a request with a penalty of 2^70 was a fault of the server."""
    for record, name in ((SamplingParams, "repetition_penalty"), (RetrievalParams, "knn_temperature")):
        value = getattr(record(**{name: 2**70}), name)
        assert (value, type(value)) == (2.0**70, float)
        with pytest.raises(InvalidInput, match=f"{name} is too large"):
            record(**{name: 10**400})
