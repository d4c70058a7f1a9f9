"""Heads that were planted are found, and nothing else is."""

import random

import pytest
import torch
from planted_heads import (
    ANTI_COPYING,
    COPYING,
    HEADS,
    INDUCTION,
    PREVIOUS,
    VOCABULARY,
    inspect_plainly,
    planted,
)

from memlm.inspect.findings import Role
from memlm.inspect.heads import losses, place_scores, repeat_losses
from memlm.inspect.inspection import advise, matched_heads
from memlm.inspect.texts import repeated_text


@pytest.fixture(scope="module", params=[HEADS, 2], ids=["own keys", "shared keys"])
def decoder(request):
    return planted(request.param)


@pytest.fixture(scope="module")
def found(decoder):
    return inspect_plainly(decoder)


def by_id(found):
    return {head.id: head for head in found.heads}


def test_planted_heads_have_their_roles_and_no_other_has_one(found):
    roles = {head.id: set(head.roles) for head in found.heads if head.roles}
    assert roles == {
        PREVIOUS: {Role.PREVIOUS},
        COPYING: {Role.COPYING},
        INDUCTION: {Role.INDUCTION, Role.COPYING},
        ANTI_COPYING: {Role.ANTI_COPYING},
    }


def test_scores_of_planted_heads_are_near_one(found):
    heads = by_id(found)
    assert heads[PREVIOUS].previous > 0.99
    assert heads[INDUCTION].induction > 0.98
    assert heads[INDUCTION].control < 0.1
    for head, sign in ((INDUCTION, 1), (COPYING, 1), (ANTI_COPYING, -1)):
        assert heads[head].copying == pytest.approx(sign, abs=1e-6)
        assert heads[head].copied == pytest.approx(sign, abs=1e-6)


def test_the_induction_head_reads_the_previous_token_head(found):
    """Its strongest K-composition by far, above that of random weights."""
    into = [link for link in found.compositions if link.target == INDUCTION and link.kind == "K"]
    assert into[0].source == PREVIOUS
    assert into[0].score > 1.5 * max(into[1].score, found.random_composition[1])


def test_the_second_copy_costs_little(found):
    first, second, *_ = found.repeat_losses
    assert first > 2.5
    assert second < 0.3


def test_leaving_the_induction_head_out_takes_the_copying_away(found):
    assert found.ablation.heads == (INDUCTION,)
    assert found.ablation.loss < 0.1
    assert found.ablation.loss_without > 2.5
    assert max(found.ablation.losses_without_others) < 0.1


def test_without_the_previous_token_head_there_is_no_induction(decoder):
    text = repeated_text(range(VOCABULARY), longest=64)
    assert repeat_losses(losses(decoder, text, [PREVIOUS]), text)[1] > 2.5


def test_the_layer_of_the_induction_head_is_advised(found):
    assert found.advice.layers == (1,)
    assert "No retrieval head" in found.advice.basis


def test_nothing_is_advised_without_evidence():
    assert advise([], 3).layers == ()


def test_shuffled_repeats_have_no_induction(decoder):
    text = repeated_text(range(VOCABULARY), longest=64)
    for score, control in zip(
        place_scores(decoder, text).sums["induction"].flatten().tolist(),
        place_scores(decoder, text.shuffled()).sums["induction"].flatten().tolist(),
        strict=True,
    ):
        assert control < 0.1 or control <= score


def test_heads_that_change_places_take_their_scores_along():
    decoder, found = planted(), inspect_plainly(planted())
    order, d = [2, 0, 3, 1], decoder.config.head_dim
    with torch.no_grad():
        for block in decoder.blocks:
            for weight_CdD in block.attention.qkv.weight.view(3, HEADS, d, -1):
                weight_CdD.copy_(weight_CdD[order].clone())
            by_head_DHd = block.attention.out.weight.unflatten(1, (HEADS, d))
            block.attention.out.weight.copy_(by_head_DHd[:, order].flatten(1))
    moved = by_id(inspect_plainly(decoder))
    for head in found.heads:
        other = moved[head.layer, order.index(head.head)]
        for name in ("induction", "previous", "duplicate", "first", "copied"):
            assert getattr(other, name) == pytest.approx(getattr(head, name), abs=1e-6)


def test_matched_heads_are_of_the_same_layers_while_there_are_any():
    heads = [(1, 0), (1, 1), (1, 2), (2, 0)]
    drawn = matched_heads(heads, range(3), 4, random.Random(0))
    assert len(set(drawn)) == 4
    assert not set(drawn) & set(heads)
    assert (1, 3) in drawn
    assert any(layer == 2 for layer, _ in drawn)
    assert len(matched_heads([(0, 0), (0, 1), (0, 2)], range(1), 4, random.Random(0))) == 1
