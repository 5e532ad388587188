"""The router's choice of experts: the best few of a short row, by k searches for the largest.

A row is a few hundred logits, so it stays in the registers of one warp and nothing is sorted: a search is a reduction,
and k of them cost less than a sort that would also have to be stable. Excluded groups and logits that are NaN are minus
infinity and are still chosen, lowest first, when nothing better is left; padding never is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from deepinfer_compile import ops
from deepinfer_compile.kernels import (
    Call,
    Case,
    KernelSpec,
    Limits,
    Refused,
    alignment,
    next_power_of_2,
    pointer,
    side_by_side,
    type_name,
)
from deepinfer_compile.ops.moe import GROUP_RANKS, KINDS
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand

DTYPES = (torch.float32, torch.bfloat16)
LONGEST = 4096
"""Columns of a row that fit the registers of a program, with what is known about each."""
TILE = 4096
"""Most columns of a program that holds several rows."""
ROWS = (1, 2, 4, 8, 16)
WARPS = (1, 2, 4, 8, 16)
COLUMNS_A_WARP = 512


@dataclass(frozen=True)
class Params:
    """As in the operation. biased: whether a bias steers the choice. align: elements, of which every row starts at a
    multiple."""

    experts: int
    top_k: int
    dtype: torch.dtype
    biased: bool
    bias_dtype: torch.dtype
    kind: str
    groups: int
    kept_groups: int
    group_rank: str
    normalize: bool
    eps: float
    scale: float
    align: int

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts or self.groups < 1 or self.experts % self.groups:
            raise ValueError(f"{self.top_k} of {self.experts} experts in {self.groups} groups")
        if self.kind not in KINDS or self.group_rank not in GROUP_RANKS or self.columns > LONGEST:
            raise ValueError(f"no router of kind {self.kind!r}, group rank {self.group_rank!r}, {self.columns} columns")

    @property
    def columns(self) -> int:
        """Columns of a row in the kernel, groups padded."""
        return next_power_of_2(self.groups) * next_power_of_2(self.experts // self.groups)


@dataclass(frozen=True)
class Config:
    """rows: rows of one program, a power of two."""

    rows: int
    num_warps: int


def bind(call: Call) -> Params | Refused:
    """Params of a call of route."""
    given = call.arguments
    logits, bias, groups = given["logits"], given["bias"], given["groups"]
    if logits.dtype not in DTYPES or (bias is not None and bias.dtype not in DTYPES):
        return Refused(f"logits of {logits.dtype} have no kernel")
    if logits.dim() < 2 or not all(statically_known_true(n == 1) for n in logits.shape[:-2]):
        return Refused("rows under more than one size; collapse them to one")
    if not isinstance(logits.shape[-1], int) or logits.shape[-1] % groups:
        return Refused(f"{logits.shape[-1]} experts in {groups} groups")
    if next_power_of_2(groups) * next_power_of_2(logits.shape[-1] // groups) > LONGEST:
        return Refused(f"rows of {logits.shape[-1]} experts are longer than {LONGEST}")
    for tensor in (logits, bias):
        if tensor is not None and not side_by_side(tensor):
            return Refused("the elements of a row do not lie side by side")
    return Params(
        experts=logits.shape[-1],
        top_k=int(given["k"]),
        dtype=logits.dtype,
        biased=bias is not None,
        bias_dtype=logits.dtype if bias is None else bias.dtype,
        kind=given["kind"],
        groups=int(groups),
        kept_groups=int(given["kept_groups"]),
        group_rank=given["group_rank"],
        normalize=bool(given["normalize"]),
        eps=float(given["eps"]),
        scale=float(given["scale"]),
        align=alignment(logits, bias),
    )


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """A row a program, and a warp for every 512 columns: a search within one warp waits for no other."""
    return Config(1, max(1, min(limits.max_warps, WARPS[-1], params.columns // COLUMNS_A_WARP)))


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Rows a program and warps, from 32 to 1024 columns a warp."""
    for rows, warps in product(ROWS, WARPS):
        held = rows * params.columns
        if warps > limits.max_warps or (rows > 1 and held > TILE):
            continue
        if (warps == 1 or held >= 32 * warps) and held <= max(1024, params.columns // limits.max_warps) * warps:
            yield Config(rows, warps)


def plan(params: Params, config: Config) -> LaunchPlan:
    """One launch over all rows."""
    rows: Expr = ("size", "logits", -2)
    operands = [Operand("logits", type_name(params.dtype), (None, params.experts))]
    arguments = [pointer("logits", params.dtype, params.align)]
    if params.biased:
        operands.append(Operand("bias", type_name(params.bias_dtype), (params.experts,)))
        arguments.append(pointer("bias", params.bias_dtype, params.align))
    arguments += [pointer("ids", torch.int32), pointer("weights", torch.float32), Argument("rows", "i32", rows)]
    arguments.append(Argument("logits_row", "i64", ("stride", "logits", -2), params.align))
    shape = (rows, params.top_k)
    results = (Buffer("ids", "int32", shape), Buffer("weights", "float32", shape))
    launch = Launch("route", (("cdiv", rows, config.rows),), tuple(arguments), {"num_warps": config.num_warps})
    return LaunchPlan(tuple(operands), results, (), (launch,))


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Ten operations a logit, each read once."""
    logits = sum(new) * params.experts
    return Work(10 * logits, logits * params.dtype.itemsize)


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Rows apart in a tensor of NaN, some with a logit of NaN; every fourth row has one score for all."""
    params, tokens = case.params, sum(case.new)
    step = ((params.experts // params.align) | 1) * params.align + 2 * params.align
    wide = torch.full((tokens + 1, step), math.nan, dtype=params.dtype)
    logits = wide[1:, params.align : params.align + params.experts]
    logits.copy_(torch.randn(logits.shape, generator=generator) * 2)
    logits[3::4] = 0.5
    if params.experts > params.top_k:
        logits[1::3, params.experts // 2] = math.nan
    bias = torch.randn(params.experts, generator=generator).to(params.bias_dtype) if params.biased else None
    fields = ("kind", "groups", "kept_groups", "group_rank", "normalize", "eps", "scale")
    found = {"k": params.top_k, **{name: getattr(params, name) for name in fields}}
    return {"logits": logits, "bias": bias, "kind": found.pop("kind"), **found}


def _case(name: str, new: tuple[int, ...], lengths: tuple[int, ...], **changes: Any) -> Case[Params]:
    usual = Params(256, 8, torch.float32, False, torch.float32, "softmax", 1, 1, "none", True, 0.0, 1.0, 16)
    return Case(name, replace(usual, **changes), new, lengths)


SIGMOID: dict[str, Any] = {"kind": "sigmoid", "biased": True, "group_rank": "top2", "eps": 1e-20, "scale": 2.5}
BF16 = torch.bfloat16
CASES = (
    _case("one", (2,), (2,), experts=1, top_k=1, align=1),
    _case("softmax", (5, 3), (9, 3), experts=60, top_k=4, dtype=BF16, bias_dtype=BF16, align=4),
    _case("chosen", (7,), (7,), experts=33, top_k=4, kind="softmax_topk", normalize=False, align=1),
    _case("grouped", (9,), (9,), experts=48, top_k=6, groups=8, kept_groups=3, **SIGMOID),
    _case("odd", (6,), (6,), experts=35, top_k=3, groups=5, kept_groups=2, group_rank="max", scale=16.0, align=1),
    _case(
        "softplus", (4,), (4,), experts=24, kind="sqrt_softplus", top_k=2, biased=True, dtype=BF16, scale=1.5, align=8
    ),
    _case("singles", (5,), (5,), experts=6, top_k=3, groups=6, kept_groups=4, **SIGMOID, align=2),
    _case("all", (4,), (4,), experts=5, top_k=5, kind="sigmoid", align=1),
    _case("typical", (1,) * 64, (4096,) * 64, groups=8, kept_groups=4, **SIGMOID),
    _case("largest", (8192,), (8192,), experts=512, top_k=10),
)

SPECS = (
    KernelSpec(
        name="route",
        op=ops.ROUTE,
        params=Params,
        config=Config,
        sources={"triton": "triton.py.j2"},
        bind=bind,
        default=default,
        space=space,
        plan=plan,
        work=work,
        cases=CASES,
        inputs=inputs,
        tolerance={torch.float32: 5e-6, torch.bfloat16: 5e-6},
    ),
)
