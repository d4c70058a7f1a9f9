"""Texts with adapters: side by side in one batch, in sessions, with drafts, beside datastores."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from random_adapters import SPECS, save_random_adapter

from memlm.base.steps import run_steps
from memlm.errors import Incompatible, InvalidInput, NotFound
from memlm.generation.drive import complete_all
from memlm.generation.sessions.sessions import Sessions
from memlm.language_model import LanguageModel, load
from memlm.model.files.adapter_files import attach_adapters, merge_adapter
from memlm.model.files.checkpoint import load_checkpoint

GREEDY = {"temperature": 0, "max_tokens": 12}
PROMPTS = ("the memory of", "a key and a value", "one two three four five", "the river")
NAMES = (None, "lora", "bottleneck", "lora of a part")


@pytest.fixture(scope="module")
def folders(model_folder, tmp_path_factory) -> dict[str, Path]:
    checkpoint, parent = load_checkpoint(model_folder), tmp_path_factory.mktemp("adapters")
    return {name: save_random_adapter(parent / name, checkpoint, spec) for name, spec in SPECS.items()}


@pytest.fixture
def adapted(model_folder, store_folder, folders) -> Iterator[LanguageModel]:
    with load(model_folder, [store_folder], adapters=folders) as lm:
        yield lm


def ids_of(tokens) -> list[int]:
    return [token.id for token in tokens]


def test_an_adapter_changes_the_text_as_the_merged_model_does_and_others_stay_as_they_are(
    adapted, model_folder, folders, tmp_path
):
    merge_adapter(model_folder, folders["lora"], tmp_path / "merged")
    for prompt in PROMPTS:
        plain = ids_of(adapted.generate(prompt, use_store=False, **GREEDY))
        with load(tmp_path / "merged") as merged, load(model_folder) as base:
            expected = ids_of(merged.generate(prompt, **GREEDY))
            assert plain == ids_of(base.generate(prompt, **GREEDY))
        assert ids_of(adapted.generate(prompt, adapter="lora", **GREEDY)) == expected != plain
    assert adapted.info.adapters == tuple(SPECS)
    assert load(model_folder, adapters=[folders["lora"]]).info.adapters == ("lora",)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_of_one_batch_have_their_own_adapters(model_folder, folders, dtype):
    from memlm.api.params import GenerateRequest

    with load(model_folder, dtype=dtype, adapters=folders) as lm:
        requests = [
            GenerateRequest.of(prompt, {**GREEDY, "adapter": name, "use_store": False, "top_logprobs": 3})
            for prompt in PROMPTS for name in NAMES
        ]  # fmt: skip
        together = complete_all(lm.checkpoint, [run_steps(lm.engine.start(request)) for request in requests])
        for request, completion in zip(requests, together, strict=True):
            alone = list(lm.generate(request))
            assert ids_of(completion.tokens) == ids_of(alone)
            found, expected = ([token.logprob for token in tokens] for tokens in (completion.tokens, alone))
            if request.adapter is None and lm.checkpoint.decoder.reads_alike:
                assert found == expected
            assert found == pytest.approx(expected, abs=2e-3 if dtype == "int8" else 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_drafts_change_no_text_of_an_adapter(model_folder, folders, dtype):
    with load(model_folder, dtype=dtype, adapters=folders) as lm:
        for name in NAMES[1:]:
            plain = lm.generate(PROMPTS[0], adapter=name, drafts=0, **{**GREEDY, "max_tokens": 24})
            text = plain.result().text
            stream = lm.generate(PROMPTS[0], adapter=name, drafts=6, draft=text, **{**GREEDY, "max_tokens": 24})
            assert stream.result().text == text
            assert sum(usage.accepted for usage in stream.finished.usage.drafts) > 0
            open_ = lm.generate(PROMPTS[0], adapter=name, draft=text, **GREEDY)
            open_.result()
            assert not open_.finished.usage.drafts  # rows with an adapter are not read alike to the bit


def test_a_session_keeps_its_adapter(adapted):
    adapted_ids = ids_of(adapted.generate(PROMPTS[2], adapter="lora", **GREEDY))
    with adapted.session(adapter="lora") as session:
        assert session.info().adapter == "lora"
        session.append("one two three ")
        session.append("four five")
        with session.fork() as fork:
            for each in (session, fork):
                assert each.info().adapter == "lora"
                assert ids_of(each.generate("", **GREEDY)) == adapted_ids
        assert ids_of(session.generate(" and", adapter="lora", **GREEDY))
        session.forget(3, session.info().num_tokens)
        assert session.info().adapter == "lora"
        with pytest.raises(
            InvalidInput, match="adapter is 'bottleneck', and the session's text is read with the adapter 'lora'"
        ):
            session.generate("x", adapter="bottleneck", **GREEDY)
        session.forget(0, session.info().num_tokens)
        session.append(PROMPTS[2])
        assert ids_of(session.generate("", **GREEDY)) == adapted_ids
    with adapted.session() as session:
        with pytest.raises(InvalidInput, match="is read with the model alone"):
            session.generate("x", adapter="lora", **GREEDY)
        assert session.info().adapter is None


def test_unknown_adapters_are_not_found(adapted):
    for ask in (lambda: adapted.generate("x", adapter="none"), lambda: adapted.session(adapter="none")):
        with pytest.raises(NotFound, match="no adapter 'none'; the adapters are lora, lora of a part, bottleneck"):
            ask()
    with pytest.raises(InvalidInput, match="adapter is given with early_exit"):
        adapted.generate("x", adapter="lora", early_exit=True)


def test_sessions_on_disk_come_back_with_their_adapter_or_not_at_all(model_folder, folders, tmp_path):
    def opened(adapters: dict[str, Path]) -> LanguageModel:
        checkpoint = load_checkpoint(model_folder)
        attach_adapters(checkpoint, adapters)
        return LanguageModel(checkpoint, (), Sessions(checkpoint, folder=tmp_path / "sessions"))

    lm = opened(folders)
    session = lm.session(adapter="lora")
    session.append(PROMPTS[2])
    expected = ids_of(lm.generate(PROMPTS[2], adapter="lora", **GREEDY))
    again = opened(folders)
    assert again.get_session(session.name).adapter == "lora"
    assert ids_of(again.generate("", session=session.name, **GREEDY)) == expected
    for adapters in ({}, {"lora": folders["bottleneck"]}):
        with pytest.raises(Incompatible, match="with an adapter 'lora' that is not loaded, or is another one now"):
            opened(adapters)


def test_an_adapter_searches_no_datastore_and_refuses_one_with_keys(adapted, store_folder):
    name = store_folder.name
    stream = adapted.generate(PROMPTS[0], adapter="lora", **GREEDY)
    assert stream.accepted.store is None
    assert all(token.lam == 0 for token in stream)
    assert adapted.generate(PROMPTS[0], **GREEDY).accepted.store == name
    for options in ({"store": name}, {"stores": [name]}):
        with pytest.raises(InvalidInput, match=f"the datastore '{name}' has the keys of the model without the adapter"):
            adapted.generate(PROMPTS[0], adapter="lora", **options)
    assert adapted.generate(PROMPTS[0], adapter="lora", use_store=False, **GREEDY).result().text


def test_names_are_given_once(model_folder, folders):
    with pytest.raises(InvalidInput, match="there is an adapter 'lora' already"):
        load(model_folder, adapters=[folders["lora"], folders["lora"]])
