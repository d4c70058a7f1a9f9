"""The model with its datastore: generation, scoring and search against the plain twins."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from batch_helpers import start
from reference import decode_plainly, mix_plainly

from memlm.api.params import GenerateRequest, RetrievalParams
from memlm.data.corpus import Corpus
from memlm.errors import Incompatible, InvalidInput, NotFound
from memlm.index.store.datastore import Datastore
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel, load
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint
from memlm.retrieval.store import MARK_TOKENS, ModelStore

PROMPT = "the memory of a model can"
ASK = {"k": 16, "lam": 0.4, "knn_temperature": 3.0}


@pytest.fixture
def own_store(store_folder: Path, tmp_path: Path) -> Path:
    """A copy of the store, to be changed."""
    return Path(shutil.copytree(store_folder, tmp_path / "store"))


def plain_mixture(lm: LanguageModel, tokens: list[int]) -> np.ndarray:
    """The mixture after some tokens, from the decoder's plain twin and exact search."""
    logprobs_TV, keys_TD = decode_plainly(lm.checkpoint.decoder, tokens)
    found = lm.engine.stores.model_store().snapshot.exact().search(keys_TD[-1:].astype(np.float32), ASK["k"])
    neighbors = found.distances_QK[0].tolist(), found.values_QK[0].tolist()
    return np.log(mix_plainly(np.exp(logprobs_TV[-1]), *neighbors, ASK["knn_temperature"], ASK["lam"]))


def test_generation_equals_the_plain_mixture_token_by_token(lm):
    drawn = list(lm.generate(PROMPT, temperature=0, max_tokens=8, **ASK))
    tokens = [lm.checkpoint.tokenizer.end_id, *lm.tokenize(PROMPT)]
    for token in drawn:
        expected_V = plain_mixture(lm, tokens)
        assert token.id == expected_V.argmax()
        assert token.logprob == pytest.approx(expected_V[token.id], abs=2e-3)
        assert token.lam == ASK["lam"]
        mixed = math.log(0.4 * math.exp(token.knn_logprob) + 0.6 * math.exp(token.lm_logprob))
        assert token.logprob == pytest.approx(mixed, abs=1e-5)
        assert token.knn_share == pytest.approx(0.4 * math.exp(token.knn_logprob - token.logprob), abs=1e-6)
        tokens.append(token.id)


def test_generation_and_scoring_give_the_same_numbers(lm):
    drawn = list(lm.generate("", temperature=0, max_tokens=20, **ASK))
    text = "".join(token.text for token in drawn)
    scored = lm.score(text, token_scores=True, **ASK)
    if [token.id for token in drawn] == lm.tokenize(text):
        for token, score in zip(drawn, scored.token_scores, strict=True):
            assert token.logprob == pytest.approx(score.logprob, abs=1e-3)
    assert scored.nll == pytest.approx(-sum(score.logprob for score in scored.token_scores), rel=1e-5)
    assert scored.base.nll == pytest.approx(-sum(score.lm_logprob for score in scored.token_scores), rel=1e-5)


def test_figures_follow_from_nats_and_counts(lm):
    text = "the memory of a\nmodel é\n"
    scored = lm.score(text, **ASK)
    assert (scored.words, scored.bytes, scored.tokens) == (8, len(text.encode()), len(lm.tokenize(text)))
    assert scored.bits_per_byte == pytest.approx(scored.nll / math.log(2) / scored.bytes)
    assert scored.token_perplexity == pytest.approx(math.exp(scored.nll / scored.tokens))
    assert scored.word_perplexity == pytest.approx(math.exp(scored.nll / scored.words))


def test_lam_0_is_the_model_bit_for_bit(lm):
    alone = [(t.id, t.logprob) for t in lm.generate(PROMPT, temperature=0, max_tokens=8, use_store=False)]
    silent = [(t.id, t.logprob) for t in lm.generate(PROMPT, temperature=0, max_tokens=8, lam=0.0)]
    assert alone == silent
    assert lm.score(PROMPT, lam=0.0).knn == lm.score(PROMPT).base


def test_lam_1_is_the_memory_alone(lm):
    for token in lm.generate(PROMPT, seed=1, max_tokens=8, lam=1.0, k=4):
        assert token.logprob == token.knn_logprob
        assert token.knn_share == 1.0


def test_a_text_that_is_stored_is_found_at_its_own_place(lm, corpus_folder):
    document = next(iter(Corpus([corpus_folder / "doc-3.txt"])))
    tokens = lm.tokenize(document.text)
    size = next(n for n in range(40, 10, -1) if lm.tokenize(lm.detokenize(tokens[:n])) == tokens[:n])
    before = lm.detokenize(tokens[:size])
    nearest = lm.search(None, before, k=3)[0]
    assert (nearest.document_id, nearest.token_offset, nearest.token_id) == ("doc-3.txt", size, tokens[size])
    assert nearest.line == 1 + before.count("\n") > 1
    assert nearest.char_offset == len(before)
    assert document.text[nearest.char_offset :].startswith(nearest.token_text)
    assert nearest.distance < 1e-2
    assert nearest.snippet == lm.detokenize(tokens[size - 12 : size + 12])


def test_every_neighbor_states_its_place_as_reading_its_document_does(lm):
    datastore, tokenizer = lm.engine.stores.model_store().datastore, lm.checkpoint.tokenizer
    documents = {row.id: datastore.snapshot.tokens(row.id).tolist() for row in datastore.snapshot.documents()}
    assert max(map(len, documents.values())) > 3 * MARK_TOKENS
    neighbors = lm.search(None, PROMPT, k=datastore.snapshot.num_entries)
    assert len(neighbors) == datastore.snapshot.num_entries
    for neighbor in neighbors:
        tokens, offset = documents[neighbor.document_id], neighbor.token_offset
        before = tokenizer.decode(tokens[:offset])
        assert neighbor.token_id == tokens[offset]
        assert neighbor.token_text == tokenizer.decode([tokens[offset]])
        assert neighbor.line == 1 + before.count("\n")
        assert neighbor.char_offset == len(before)
        assert neighbor.snippet == tokenizer.decode(tokens[max(0, offset - 12) : offset + 12])


def test_a_tokens_neighbors_are_the_nearest_with_their_weights(lm):
    token = next(iter(lm.generate(PROMPT, temperature=0, max_tokens=1, neighbors=5, **ASK)))
    assert [n.distance for n in token.neighbors] == sorted(n.distance for n in token.neighbors)
    assert len(token.neighbors) == 5
    everything = next(iter(lm.generate(PROMPT, temperature=0, max_tokens=1, neighbors=16, **ASK))).neighbors
    assert sum(neighbor.weight for neighbor in everything) == pytest.approx(1, abs=1e-5)
    agreeing = sum(neighbor.weight for neighbor in everything if neighbor.token_id == token.id)
    assert agreeing == pytest.approx(math.exp(token.knn_logprob), abs=1e-5)


def test_a_deleted_document_contributes_to_no_answer(model_folder, own_store):
    with load(model_folder, [own_store]) as lm:
        loud = lm.search(None, PROMPT, k=1)[0].document_id
        report = lm.delete_documents([loud])
        assert (report.num_documents, report.num_entries > 0) == (1, True)
        assert loud not in {neighbor.document_id for neighbor in lm.search(None, PROMPT, k=4000)}
        expected_V = plain_mixture(lm, [lm.checkpoint.tokenizer.end_id, *lm.tokenize(PROMPT)])
        token = next(iter(lm.generate(PROMPT, temperature=0, max_tokens=1, **ASK)))
        assert token.logprob == pytest.approx(expected_V.max(), abs=2e-3)
        with pytest.raises(NotFound, match=loud):
            lm.delete_documents([loud])


def test_what_was_deleted_stays_silent_in_a_store_that_was_opened_before(model_folder, own_store):
    with load(model_folder, [own_store]) as lm:
        opened, loud = ModelStore.open(own_store, lm.checkpoint), lm.search(None, PROMPT, k=1)[0].document_id
        lm.delete_documents([loud])
        lm.engine.stores.register_store(opened, replace=True)
        assert loud not in {neighbor.document_id for neighbor in lm.search(None, PROMPT, k=4000)}


@pytest.mark.parametrize("name", ["store", "twin"])
def test_what_is_deleted_is_silent_in_a_store_that_is_loaded_meanwhile(model_folder, own_store, monkeypatch, name):
    with load(model_folder, [own_store]) as lm:
        loud, datastore = lm.search(None, PROMPT, k=1)[0].document_id, lm.engine.stores.model_store().datastore
        deleting = datastore.prepare_delete

        def slowly(document_ids):
            lm.engine.stores.register_store(ModelStore.open(own_store, lm.checkpoint, name), replace=True)
            return deleting(document_ids)

        monkeypatch.setattr(datastore, "prepare_delete", slowly)
        lm.delete_documents([loud])
        assert loud not in {neighbor.document_id for neighbor in lm.search(name, PROMPT, k=4000)}


def test_what_is_deleted_is_silent_in_a_generation_whose_store_was_replaced_meanwhile(model_folder, own_store):
    with load(model_folder, [own_store]) as lm:
        stream = lm.generate(PROMPT, temperature=0, max_tokens=4, k=50, neighbors=50)
        loud = next(stream).neighbors[0].document_id
        lm.load_datastore(own_store, replace=True)
        lm.delete_documents([loud])
        assert loud not in {neighbor.document_id for token in stream for neighbor in token.neighbors}


def test_what_another_process_deletes_is_silent_in_a_generation_whose_store_was_unloaded(model_folder, own_store):
    with load(model_folder, [own_store]) as lm:
        stream = lm.generate(PROMPT, temperature=0, max_tokens=4, k=50, neighbors=50)
        loud = next(stream).neighbors[0].document_id
        lm.unload_datastore("store")
        Datastore.open(own_store).delete([loud])
        lm.refresh()
        assert loud not in {neighbor.document_id for token in stream for neighbor in token.neighbors}


def test_a_store_whose_documents_are_all_deleted_leaves_the_model(model_folder, own_store):
    with load(model_folder, [own_store]) as lm:
        lm.delete_documents([document.id for document in lm.engine.stores.model_store().snapshot.documents()])
        alone = [t.logprob for t in lm.generate(PROMPT, temperature=0, max_tokens=4, use_store=False)]
        assert [t.logprob for t in lm.generate(PROMPT, temperature=0, max_tokens=4, lam=1.0)] == alone
        assert lm.score(PROMPT).knn.nll == lm.score(PROMPT).base.nll


def test_a_store_of_another_model_is_refused_by_name(checkpoint, store_folder, tmp_path):
    other = load_checkpoint(checkpoint.path)
    with torch.no_grad():
        other.decoder.norm.weight[0] += 1
    save_checkpoint(tmp_path / "other", other.decoder, other.tokenizer)
    with pytest.raises(Incompatible, match="another model"):
        load(tmp_path / "other", [store_folder])


def test_a_store_of_another_tokenizer_is_refused_by_name(checkpoint, store_folder, tmp_path):
    from memlm.data.tokenizer import Tokenizer

    save_checkpoint(tmp_path / "other", checkpoint.decoder, Tokenizer.train(["other words"], vocab_size=260))
    with pytest.raises(Incompatible, match="another tokenizer"):
        load(tmp_path / "other", [store_folder])


def test_stores_are_chosen_by_name(model_folder, store_folder, own_store, tmp_path):
    second = shutil.copytree(own_store, tmp_path / "second")
    with load(model_folder, [store_folder, second]) as lm:
        assert [info.name for info in lm.stores] == ["store", "second"]
        assert start(lm, GenerateRequest(PROMPT, retrieval=RetrievalParams(store="second"))).accepted.store == "second"
        assert start(lm, GenerateRequest(PROMPT)).accepted.store == "store + second"
        with pytest.raises(InvalidInput, match="store, second"):
            lm.delete_documents(["doc-1.txt"])
        with pytest.raises(InvalidInput, match="either store or stores"):
            lm.generate(PROMPT, store="store", stores=["second"])
        with pytest.raises(NotFound, match="nowhere"):
            lm.generate(PROMPT, store="nowhere")
    with pytest.raises(InvalidInput, match="two datastores"):
        load(model_folder, [store_folder, own_store])


def test_without_a_store_search_says_so(model_folder):
    with load(model_folder) as lm, pytest.raises(InvalidInput, match="no datastore is loaded"):
        lm.search(None, "x")


def test_an_empty_text_has_no_score(lm):
    with pytest.raises(InvalidInput, match="empty"):
        lm.score("")


@pytest.mark.parametrize("index", ["auto", "IVF4,SQfp16", "IVF4,SQ8"])
def test_with_every_index_the_numbers_are_near_the_exact_ones(
    model_folder, corpus_folder, store_folder, tmp_path, index
):
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "s", index=index)
    with load(model_folder, [tmp_path / "s"]) as lm, load(model_folder, [store_folder]) as exact:
        near = lm.score(PROMPT, nprobe=4, **ASK).nll
        assert near == pytest.approx(exact.score(PROMPT, **ASK).nll, rel=0.02)


def test_lines_and_characters_are_counted_far_into_a_document(model_folder, tokenizer, tmp_path):
    from texts import make_text

    document = {"id": "long", "text": make_text(3, 2500), "author": "nobody", "year": 1999}
    (tmp_path / "long.jsonl").write_text(json.dumps(document) + "\n")
    build_index(model_folder, Corpus([tmp_path / "long.jsonl"]), tmp_path / "s", index="IVF8,SQfp16")
    with load(model_folder, [tmp_path / "s"]) as lm:
        memory, (segment,) = lm.engine.stores.model_store(), lm.engine.stores.model_store().snapshot.segments
        tokens = tokenizer.encode(document["text"])
        assert len(tokens) > 4 * 1024
        offsets = np.array([0, 1, 1023, 1024, 1025, 3000, len(tokens) - 1])
        ids_K, zeros_K = segment.base_id + offsets, np.zeros(len(offsets), np.float32)
        for neighbor in memory.describe(ids_K, zeros_K, zeros_K, tokens[offsets]):
            before = tokenizer.decode(tokens[: neighbor.token_offset].tolist())
            if "\ufffd" not in before:
                assert neighbor.char_offset == len(before)
            assert neighbor.line == 1 + before.count("\n")
            assert neighbor.metadata == {"author": "nobody", "year": 1999}
