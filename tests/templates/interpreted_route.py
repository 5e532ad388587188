"""route in Triton's interpreter: masked groups, logits that are no number, ties, padding, rows far apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, specs
from tests.far_memory import fenced, sparse
from tests.triton_interpreter import run

SPEC = next(s for s in specs() if s.op is ops.ROUTE)
INF, NAN = math.inf, math.nan
KINDS = ["softmax", "softmax_topk", "sigmoid", "sqrt_softplus"]


def route(
    logits: Tensor, bias: Tensor | None, folder: Path, rows: int = 1, **options: Any
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The operands, and ids and weights of the kernel."""
    usual = {"kind": "sigmoid", "k": 3, "groups": 1, "kept_groups": 1, "group_rank": "none"}
    given = {"logits": logits, "bias": bias, **usual, "normalize": True, "eps": 0.0, "scale": 1.0, **options}
    params = SPEC.bind(Call(SPEC.op, given, "decode"))
    ids, weights = run(SPEC, params, SPEC.config(rows, 1), given, folder)
    return given, ids, weights


def check(logits: Tensor, bias: Tensor | None, folder: Path, rows: int = 1, **options: Any) -> tuple[Tensor, Tensor]:
    """The kernel's ids are the operation's, and so are its weights, NaN included."""
    given, ids, weights = route(logits, bias, folder, rows, **options)
    want_ids, want = SPEC.op.reference(*given.values())
    assert torch.equal(ids, want_ids), (ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-30, equal_nan=True)
    return ids, weights


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 2])
def test_moe_1_excluded_groups_never_win(rows: int, tmp_path: Path) -> None:
    logits = torch.tensor([[2.0, 1, 0.5, 0, -1, -2, -3, -4]])
    options = {"groups": 4, "kept_groups": 2, "group_rank": "top2"}
    _, ids, weights = route(logits, torch.full((8,), -1.0), tmp_path, rows, **options)
    assert ids.tolist() == [[0, 1, 2]]
    assert (weights - torch.tensor([[0.39421, 0.32720, 0.27859]])).abs().max() <= 1e-5


@pytest.mark.parametrize("rank", ["max", "top2"])
@pytest.mark.parametrize("experts", [8, 12, 20])
def test_moe_1_any_bias(experts: int, rank: str, tmp_path: Path) -> None:
    """By hand: four groups of 2, 3 and 5; biases from -20 to 20 decide which are kept, never how much one weighs."""
    logits, size = random(6, experts, seed=experts) * 3, experts // 4
    for seed in range(4):
        bias = torch.rand(experts, generator=torch.Generator().manual_seed(seed)) * 40 - 20
        options = {"groups": 4, "kept_groups": 2, "group_rank": rank, "scale": 2.5}
        _, ids, weights = route(logits, bias, tmp_path, 4, **options)
        score = logits.sigmoid()
        for row, choice in enumerate((score + bias).tolist()):
            best = [sorted(choice[g * size : (g + 1) * size])[::-1][: 2 if rank == "top2" else 1] for g in range(4)]
            kept = sorted(range(4), key=lambda g: -sum(best[g]))[:2]
            want = sorted((e for e in range(experts) if e // size in kept), key=lambda e: -choice[e])[:3]
            assert ids[row].tolist() == want
            share = score[row, want] / score[row, want].sum() * 2.5
            assert (weights[row] - share).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("groups", "rank"), [(1, "none"), (4, "top2"), (4, "max")])
def test_moe_2_bad_logits(kind: str, biased: bool, groups: int, rank: str, tmp_path: Path) -> None:
    logits = random(7, 8, seed=1)
    logits[0] = NAN
    logits[1, 2] = NAN
    logits[2, 5] = INF
    logits[3] = -INF
    logits[5, :6] = NAN
    logits[6] = torch.tensor([NAN, -INF, NAN, 0, -INF, NAN, NAN, -INF])
    bias = random(8, seed=2) if biased else None
    options: dict[str, Any] = {"kind": kind, "k": 4, "groups": groups, "kept_groups": max(1, groups // 2)}
    options |= {"group_rank": rank, "eps": 1e-20}
    ids, weights = check(logits, bias, tmp_path, 4, **options)
    for row in ids.tolist():
        assert len(set(row)) == 4
        assert all(0 <= e < 8 for e in row)
    assert weights[[0, 3]].isnan().all()
    assert weights[1].isfinite().all()
    assert 2 not in ids[1].tolist()[:2]
    alone = route(logits[4:5], bias, tmp_path, 1, **options)
    assert torch.equal(alone[1][0], ids[4])
    assert torch.equal(alone[2][0], weights[4])


def test_infinite_biases_and_the_sum_of_opposite_infinities(tmp_path: Path) -> None:
    """A group whose best two add to NaN comes before one that adds to infinity, as in a sort."""
    logits = torch.tensor([[0.0] * 8, [1, 2, 3, 4, 5, 6, 7, 8]])
    options = {"groups": 4, "kept_groups": 2, "group_rank": "top2", "k": 4}
    bias = torch.tensor([1, 1, INF, 0, INF, -INF, -INF, -INF])
    ids, _ = check(logits, bias, tmp_path, **options)
    assert ids[0].tolist() == [2, 4, 3, 0]
    ids, _ = check(logits, torch.tensor([INF, INF, INF, -INF, INF, -INF, 1, 1]), tmp_path, **options)
    assert ids[0].tolist() == [2, 4, 0, 1]
    check(logits, torch.full((8,), -INF), tmp_path, **options)
    check(logits, torch.full((8,), NAN), tmp_path, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_never_wins(kind: str, tmp_path: Path) -> None:
    """Groups of 3 and of 5 are padded to 4 and 8. Rows of -inf, of NaN and with less than k scores take experts from
    the front, not padding; large negative scores and biases stay above it."""
    for groups, size in ((5, 3), (3, 5), (1, 7), (7, 1)):
        logits = torch.full((5, groups * size), -INF)
        logits[1] = NAN
        logits[2, -1] = -3e38
        logits[3] = -80.0
        logits[4] = random(groups * size)
        for bias in (None, torch.full((groups * size,), -3e38)):
            options = {"groups": groups, "kept_groups": max(1, groups - 1), "group_rank": "top2", "k": 4}
            ids, _ = check(logits, bias, tmp_path, 2, kind=kind, **options)
            assert ids[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("rows", [1, 4])
def test_moe_7_ties_go_to_the_lower_expert(rows: int, tmp_path: Path) -> None:
    logits = random(5, 384, seed=3).bfloat16() - 8
    logits[0] = 0
    high = [300, 17, 200, 5, 111, 383, 64]
    logits[1, high] = torch.arange(7, 0, -1).bfloat16()
    logits[1, [350, 250, 30, 290]] = 0.5
    logits[2, [383, 382, 0, 1]] = 1.0
    logits[3, ::2], logits[3, 1::2] = 0.0, -0.0
    for kind in KINDS:
        ids, weights = check(logits, None, tmp_path, rows, kind=kind, k=8)
        assert ids[0].tolist() == list(range(8))
        assert ids[1].tolist() == [*high, 30]
        assert ids[2].tolist()[:4] == [0, 1, 382, 383]
        assert ids[3].tolist() == list(range(8))
        again = route(logits, None, tmp_path, rows, kind=kind, k=8)
        assert torch.equal(again[1], ids)
        assert torch.equal(again[2], weights)


def test_moe_7_a_tie_between_groups_at_the_cut(tmp_path: Path) -> None:
    logits = torch.zeros(3, 16)
    logits[0, 4:8] = logits[0, 12:] = 1.0
    logits[1, 1] = logits[1, 9] = logits[1, 13] = 2.0
    for rank in ("max", "top2"):
        ids, _ = check(logits, None, tmp_path, groups=4, kept_groups=2, group_rank=rank, k=4)
        assert ids.tolist() == [[4, 5, 6, 7], [1, 9, 0, 2], [0, 1, 2, 3]]


def test_every_expert_in_descending_score(tmp_path: Path) -> None:
    logits = random(3, 21, seed=5)
    for kind in KINDS:
        ids, weights = check(logits, None, tmp_path, 2, kind=kind, k=21, normalize=False)
        assert torch.equal(ids, logits.argsort(descending=True).int())
        assert (weights[:, 1:] <= weights[:, :-1]).all()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_moe_5_the_factor_counts_once(normalize: bool, scale: float, tmp_path: Path) -> None:
    logits = torch.tensor([[0.6, 0.1, 0.2, 0.05]]).logit()
    _, ids, weights = route(logits, None, tmp_path, k=2, normalize=normalize, scale=scale)
    assert ids.tolist() == [[0, 2]]
    want = torch.tensor([[0.75, 0.25] if normalize else [0.6, 0.2]]) * scale
    assert (weights - want).abs().max() <= 1e-6


def test_small_and_large_scores_keep_their_digits(tmp_path: Path) -> None:
    """From where softplus is exp to where it is the logit itself; an error of 1e-5 of each weight."""
    logits = torch.tensor([[-80.0, -30, -18, -15, -8, -3, -0.5, 0, 0.5, 3, 15, 20, 30, 80]])
    for kind in ("sigmoid", "sqrt_softplus"):
        _, ids, weights = route(logits, None, tmp_path, kind=kind, k=14, normalize=False)
        exact = logits.double()[0, ids[0].long()]
        score = torch.sigmoid(exact) if kind == "sigmoid" else torch.log1p(torch.exp(exact)).sqrt()
        assert ((weights[0].double() - score) / score).abs().max() <= 1e-5


@pytest.mark.parametrize("experts", [1, 5, 32, 33])
def test_gen_1_neighbours_do_not_count(experts: int, tmp_path: Path) -> None:
    logits, bias = random(3, experts, seed=6), random(experts, seed=7)
    made = []
    for fill in (0.0, NAN, INF, 1e30):
        wide = torch.full((4, experts + 5), fill)
        wide[:3, 2 : 2 + experts] = logits
        wide_bias = torch.full((experts + 40,), fill)
        wide_bias[:experts] = bias
        made += [
            route(wide[:3, 2 : 2 + experts], wide_bias[:experts], tmp_path, rows, k=min(3, experts)) for rows in (1, 4)
        ]
    made.append(route(fenced(logits), fenced(bias), tmp_path, 4, k=min(3, experts)))
    for _, ids, weights in made[1:]:
        assert torch.equal(ids, made[0][1])
        assert torch.equal(weights, made[0][2])


def test_no_tokens_and_rows_past_2_to_31_elements(tmp_path: Path) -> None:
    assert route(torch.empty(0, 8), None, tmp_path)[1].shape == (0, 3)
    logits = random(3, 16, seed=8).bfloat16()
    apart = sparse((1 << 31) + 64, dtype=torch.bfloat16).as_strided((3, 16), ((1 << 30) + 16, 1))
    apart.copy_(logits)
    assert torch.equal(route(apart, None, tmp_path)[1], route(logits, None, tmp_path)[1])


def test_an_eps_is_added_to_the_sum(tmp_path: Path) -> None:
    _, weights = check(torch.tensor([[-20.0, -21, -22, -23]]), None, tmp_path, eps=1e-3)
    assert weights.sum() < 1e-5
