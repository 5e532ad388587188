"""experts in Triton's interpreter: uneven routing, ids that are no expert, blocks, odd tiles, far offsets."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, Case, specs
from tests.far_memory import fenced, sparse
from tests.triton_interpreter import POISON, run, run_all

SPEC = next(s for s in specs() if s.op is ops.EXPERTS)
F32, BF16 = torch.float32, torch.bfloat16
BASE = SPEC.params(16, 8, 8, 2, F32, torch.int32, F32, "silu", 0.0, 0.0, False, False, False, False, 1)
"""Eight experts of 16 x 8, two a token."""


def config(block_m: int = 16, n: int = 16, k: int = 16, group: int = 1, tail: int = 0, direct: bool = False) -> Any:
    return SPEC.config(block_m, n, k, 4, 2, n, k, 4, 2, group, tail, direct)


CONFIGS = [
    pytest.param(config(direct=True), id="direct"),
    pytest.param(config(), id="16"),
    pytest.param(config(32, group=4), id="32-group"),
    pytest.param(config(64, group=2, tail=16), id="64-tail"),
]


def random(*shape: int, seed: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def given_for(ids: Tensor, params: Any = BASE) -> dict[str, Any]:
    """Operands for these ids. Experts that none names, and routing weights of ids that name none, are NaN."""
    tokens, known = len(ids), (ids >= 0) & (ids < params.experts)
    first, second = (2 * params.width, params.hidden), (params.hidden, params.width)
    if params.transposed:
        first, second = first[::-1], second[::-1]
    w13 = random(params.experts, *first, seed=1, dtype=params.dtype) / params.hidden**0.5
    w2 = random(params.experts, *second, seed=2, dtype=params.dtype) / params.width**0.5
    idle = torch.ones(params.experts, dtype=torch.bool)
    idle[ids[known].long()] = False
    w13[idle] = w2[idle] = math.nan
    shares = random(*ids.shape, seed=3).abs().masked_fill(~known, math.nan)
    return {
        "x": random(tokens, params.hidden, seed=4, dtype=params.dtype),
        "ids": ids.to(params.ids_dtype),
        "weights": shares.to(params.weights_dtype),
        "w13": w13,
        "w2": w2,
        "b13": random(params.experts, 2 * params.width, seed=5, dtype=params.dtype) if params.up_bias else None,
        "b2": random(params.experts, params.hidden, seed=6, dtype=params.dtype) if params.down_bias else None,
        **{name: getattr(params, name) for name in ("act", "alpha", "limit", "interleaved", "transposed")},
    }


def gated(gate: Tensor, up: Tensor, params: Any) -> Tensor:
    """The activations, spelled out in fp64."""
    if params.act == "relu":
        return gate.clamp(min=0) * up
    if params.act == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    if params.act == "gelu_tanh":
        return gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    if params.act.startswith("swiglu"):
        gate, up = gate.clamp(max=params.limit), up.clamp(-params.limit, params.limit)
    if params.act == "swiglu_oai":
        return (up + 1) * gate / (1 + torch.exp(-params.alpha * gate))
    return gate / (1 + torch.exp(-gate)) * up


def wanted(given: dict[str, Any], params: Any) -> Tensor:
    """A loop over tokens and their choices in fp64."""
    x, w13, w2 = (given[name].double() for name in ("x", "w13", "w2"))
    if params.transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(given["ids"].tolist()):
        for choice, expert in enumerate(row):
            if not 0 <= expert < params.experts:
                continue
            lines = w13[expert] @ x[token]
            lines = lines if given["b13"] is None else lines + given["b13"][expert].double()
            gate, up = (lines[0::2], lines[1::2]) if params.interleaved else lines.chunk(2)
            made = w2[expert] @ gated(gate, up, params)
            made = made if given["b2"] is None else made + given["b2"][expert].double()
            out[token] += given["weights"][token, choice].double() * made
    return out


def check(ids: Tensor, cfg: Any, folder: Path, params: Any = BASE) -> Tensor:
    given = given_for(ids, params)
    (made,) = run(SPEC, params, cfg, given, folder)
    want = wanted(given, params)
    assert made.shape == want.shape
    assert made.dtype == params.dtype
    assert not made.isnan().any()
    allowed = SPEC.tolerance[params.dtype] * max(1e-30, float(want.abs().max()) if want.numel() else 0.0)
    assert bool(((made.double() - want).abs() <= allowed).all()), float((made.double() - want).abs().max())
    return made


@pytest.mark.parametrize("cfg", CONFIGS)
def test_moe_3_no_tokens_one_expert_and_two(cfg: Any, tmp_path: Path) -> None:
    assert check(torch.empty(0, 2, dtype=torch.int32), cfg, tmp_path).shape == (0, 16)
    check(torch.tensor([[0, 1]] * 5), cfg, tmp_path)
    check(torch.full((6, 1), 7), cfg, tmp_path, replace(BASE, top_k=1))
    check(torch.tensor([[6, 2]]), cfg, tmp_path)


@pytest.mark.parametrize("cfg", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_moe_3_ids_that_are_no_expert(cfg: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """-1, the number of experts, and the ends of the type, which a narrower one would make an expert of."""
    least, most = (-(1 << 31), (1 << 31) - 1) if dtype == torch.int32 else (-(1 << 40) + 3, (1 << 40) + 3)
    params = replace(BASE, ids_dtype=dtype)
    ids = torch.tensor([[3, -1], [-1, -1], [8, 2], [5, 4], [least, most], [most, 0], [8, -7]])
    made = check(ids, cfg, tmp_path, params)
    assert not made[[1, 4, 6]].any()
    nobody = check(torch.full((3, 2), -1), cfg, tmp_path, params)
    assert not nobody.any()


@pytest.mark.parametrize("cfg", CONFIGS[1:])
def test_moe_3_uneven_counts(cfg: Any, tmp_path: Path) -> None:
    """Around the sizes of blocks and of a nearly empty block; the last token is nobody's."""
    for counts in ([0, 1, 7, 8, 16, 32, 63, 64], [17, 0, 15, 65, 80, 81, 0, 0]):
        ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)] + [torch.tensor([-1])])
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(7))
        check(ids[order][:, None], cfg, tmp_path, replace(BASE, hidden=4, width=3, top_k=1))


def test_pairs_are_placed_by_expert_in_their_order(tmp_path: Path) -> None:
    """By hand: 19 tokens for expert 2, three pairs for expert 0, one for expert 5, the others for nobody."""
    ids = torch.full((21, 2), -1)
    ids[:3, 0] = torch.tensor([8, (1 << 40) + 2, -(1 << 40)])
    ids[:19, 1] = 2
    ids[4, 0], ids[20, 0], ids[19, 1], ids[7, 0] = 0, 0, 0, 5
    params = replace(BASE, ids_dtype=torch.int64)
    given = given_for(ids, params)
    made = run_all(SPEC, params, config(), given, tmp_path)
    assert made["counts"].tolist() == [3, 0, 19, 0, 0, 1, 0, 0]
    assert made["blocks"].tolist() == [4]
    assert made["block_expert"].tolist() == [0, 2, 2, 5] + [POISON] * 7
    odd = list(range(1, 39, 2))
    assert made["order"][:4].tolist() == [
        [8, 39, 40] + [-1] * 13,
        odd[:16],
        odd[16:] + [-1] * 13,
        [14] + [-1] * 15,
    ]
    assert (made["order"][4:] == POISON).all()
    # rows of pairs without an expert are never written, so a result without NaN has not read them
    dropped = ~((ids >= 0) & (ids < 8)).flatten()
    for found in (made, run_all(SPEC, params, config(direct=True), given, tmp_path)):
        for name in ("act", "made"):
            assert torch.equal(found[name].isnan().all(1), dropped)
            assert torch.equal(found[name].isnan().any(1), dropped)
        assert not found["out"].isnan().any()


def test_more_pairs_than_are_looked_at_at_once(tmp_path: Path) -> None:
    ids = torch.randint(-1, 3, (262, 8), generator=torch.Generator().manual_seed(8))
    params = replace(BASE, hidden=2, width=1, experts=9, top_k=8)
    given = given_for(ids, params)
    made = run_all(SPEC, params, config(128, tail=16), given, tmp_path)
    want = wanted(given, params)
    assert float((made["out"].double() - want).abs().max()) <= 5e-6 * float(want.abs().max())
    flat = ids.flatten().tolist()
    for expert in range(3):
        mine = [p for p in made["order"].flatten().tolist() if p >= 0 and flat[p] == expert]
        assert mine == [p for p, e in enumerate(flat) if e == expert]


def test_an_expert_chosen_twice_counts_twice(tmp_path: Path) -> None:
    for cfg in (config(), config(direct=True)):
        check(torch.tensor([[3, 3], [0, 3]]), cfg, tmp_path)


@pytest.mark.parametrize("size", [1, 15, 17, 40])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gen_1_tiles_that_do_not_divide(size: int, transposed: bool, interleaved: bool, tmp_path: Path) -> None:
    """Behind every operand is memory that may not be read; its last rows, lines and expert are all used."""
    params = replace(
        BASE,
        hidden=size,
        width=41 - size,
        experts=3,
        transposed=transposed,
        interleaved=interleaved,
        up_bias=True,
        down_bias=True,
    )
    given = given_for(torch.tensor([[0, 2], [2, 1], [1, 2]]), params)
    given |= {name: fenced(item) for name, item in given.items() if isinstance(item, Tensor)}
    want = wanted(given, params)
    for cfg in (config(n=16, k=32), config(32, n=32, k=16), config(n=32, k=64, direct=True)):
        (made,) = run(SPEC, params, cfg, given, tmp_path)
        assert float((made.double() - want).abs().max()) <= 5e-6 * float(want.abs().max())


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu", "swiglu_oai", "swiglu_clamp"])
def test_activations_at_both_ends(act: str, tmp_path: Path) -> None:
    """Gates and ups up to 300 either way."""
    params = replace(BASE, hidden=1, width=8, experts=1, top_k=1, act=act, alpha=1.702, limit=7.0)
    given = given_for(torch.zeros(9, 1, dtype=torch.int32), params)
    given["x"] = torch.tensor([-300.0, -60, -8, -1, 0, 1, 8, 60, 300])[:, None]
    given["w13"] = torch.linspace(-1, 1, 16).view(1, 16, 1)
    given["w2"] = given["w2"].abs()
    (made,) = run(SPEC, params, config(), given, tmp_path)
    want = wanted(given, params)
    assert torch.allclose(made.double(), want, rtol=2e-5, atol=1e-5), (made, want)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu", "swiglu_oai", "swiglu_clamp"])
@pytest.mark.parametrize("half", [0, 1])
def test_a_gate_or_an_up_that_is_no_number_is_not_hidden(act: str, half: int, tmp_path: Path) -> None:
    params = replace(BASE, act=act, limit=1.0)
    given = given_for(torch.tensor([[1, 2], [3, 0]]), params)
    given["w13"][1, 8 * half : 8 * half + 8] = math.nan
    (made,) = run(SPEC, params, config(), given, tmp_path)
    assert made[0].isnan().all()
    assert made[1].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_token_stays_alone(bad: float, tmp_path: Path) -> None:
    """Its neighbours in a block are the same to the bit."""
    for cfg, act in ((config(), "silu"), (config(64, tail=16), "relu")):
        params = replace(BASE, act=act)
        given = given_for(torch.tensor([[1, 2], [2, 1], [1, 0]]), params)
        (clean,) = run(SPEC, params, cfg, given, tmp_path)
        given["x"][1] = bad
        (made,) = run(SPEC, params, cfg, given, tmp_path)
        assert torch.equal(made[[0, 2]], clean[[0, 2]])
        assert made[1].isnan().all() if math.isnan(bad) else not made[1].isfinite().any()


def test_a_bad_routing_weight_of_an_expert_is_seen(tmp_path: Path) -> None:
    given = given_for(torch.tensor([[1, 2], [2, -1]]))
    given["weights"][0, 1] = math.nan
    (made,) = run(SPEC, BASE, config(), given, tmp_path)
    assert made[0].isnan().all()
    assert made[1].isfinite().all()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_blocks_change_no_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """A row depends neither on its block, group and neighbours nor on how pairs are found, nor does a second run. The
    sums are exact, so that the order of a product's terms, which is not ours in the interpreter, does not count."""
    ids = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(s))[:2] for s in range(20)])
    given = given_for(ids, replace(BASE, dtype=dtype, act="relu"))
    for name, size in (("x", 2), ("w13", 3), ("w2", 4)):
        given[name] = (given[name] * size).round()
    params = SPEC.bind(Call(SPEC.op, given, "decode"))
    made = [run(SPEC, params, c.values[0], given, tmp_path)[0] for c in (*CONFIGS, CONFIGS[-1])]
    assert made[0].abs().max() > 0
    assert all(torch.equal(made[0], other) for other in made[1:])
    for token in (0, 19):
        alone = {**given, **{name: given[name][token : token + 1] for name in ("x", "ids", "weights")}}
        assert torch.equal(run(SPEC, params, config(), alone, tmp_path)[0][0], made[0][token])


def test_choices_are_summed_in_their_order(tmp_path: Path) -> None:
    """1e8, 1 and -1e8 are 0 in fp32 this way round and 1 if the large ones meet first."""
    params = replace(BASE, hidden=1, width=1, experts=3, top_k=3, act="relu")
    given = given_for(torch.tensor([[0, 1, 2], [0, 2, 1]]), params)
    given.update(x=torch.ones(2, 1), w13=torch.ones(3, 2, 1), w2=torch.tensor([1e8, 1.0, -1e8]).view(3, 1, 1))
    given["weights"] = torch.ones(2, 3)
    for cfg in (config(), config(direct=True)):
        assert run(SPEC, params, cfg, given, tmp_path)[0].tolist() == [[0.0], [1.0]]


def test_moe_4_experts_past_2_to_31_elements(tmp_path: Path) -> None:
    """Matrices of 2^14 and of 2^13 elements, so experts 131072 and 262144 start at 2^31."""
    params = replace(BASE, hidden=64, width=128, experts=262200, dtype=BF16)
    hit = torch.tensor([[131071, 131072], [262144, 5], [262199, 262143]])
    place = {e: i for i, e in enumerate(hit.flatten().tolist())}
    small = given_for(torch.arange(6).view(3, 2), replace(params, experts=6))
    large = {**small, "ids": hit.to(torch.int32)}
    large["w13"] = sparse(params.experts, 256, 64, dtype=BF16)
    large["w2"] = sparse(params.experts, 64, 128, dtype=BF16)
    for expert, i in place.items():
        large["w13"][expert], large["w2"][expert] = small["w13"][i], small["w2"][i]
    cfg = config(n=64, k=64, direct=True)
    (made,) = run(SPEC, params, cfg, large, tmp_path)
    assert torch.equal(made, run(SPEC, replace(params, experts=6), cfg, small, tmp_path)[0])
    assert made.abs().min() > 0


def test_moe_4_rows_past_2_to_31_elements(tmp_path: Path) -> None:
    """Three tokens whose rows lie 2^30 + 16 elements apart."""
    given = given_for(torch.tensor([[0, 1], [2, 3], [4, 5]]), replace(BASE, dtype=BF16))
    params = SPEC.bind(Call(SPEC.op, given, "decode"))
    (same,) = run(SPEC, params, config(), given, tmp_path)
    apart = sparse((1 << 31) + 64, dtype=BF16).as_strided((3, 16), ((1 << 30) + 16, 1))
    apart.copy_(given["x"])
    (made,) = run(SPEC, params, config(), {**given, "x": apart}, tmp_path)
    assert torch.equal(made, same)


@pytest.mark.slow
def test_any_routing(tmp_path: Path) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        tokens, k = (int(torch.randint(1, most, (1,), generator=generator)) for most in (60, 6))
        ids = torch.randint(-2, 11, (tokens, k), generator=generator)
        for param in CONFIGS:
            check(ids, param.values[0], tmp_path, replace(BASE, hidden=9, width=7, top_k=k))


def test_cases_are_hit_by_every_block_size(tmp_path: Path) -> None:
    """One large case at the sizes that its defaults do not reach."""
    crowded: Case[Any] = next(c for c in SPEC.cases if c.name == "crowded")
    given = SPEC.inputs(crowded, torch.Generator().manual_seed(2))
    want = wanted(given, crowded.params)
    for block_m, tail in ((16, 0), (128, 16)):
        (made,) = run(SPEC, crowded.params, config(block_m, 64, 64, 2, tail), given, tmp_path)
        assert float((made.double() - want).abs().max()) <= 2**-7 * float(want.abs().max())
