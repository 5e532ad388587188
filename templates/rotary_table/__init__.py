"""Tables of rotary embedding: cosine and sine of every position in one launch, where ATen takes nine.

The functions are our own: a library's sine takes angles of any size by a path that keeps its digits in local memory,
while positions times frequencies stay so small that one step in fp64 brings them near zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from deepinfer_compile import ops
from deepinfer_compile.kernels import (
    Call,
    Case,
    KernelSpec,
    Limits,
    Refused,
    next_power_of_2,
    pointer,
    side_by_side,
    type_name,
)
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.ops.rope import FORMS
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand

DTYPES = (torch.float32, torch.bfloat16)
POSITIONS = (torch.int64, torch.int32)
BLOCKS = (1, 2, 4, 8, 16, 32, 64)
TILE = 2048
"""Most angles of a program."""
FULL = 4
"""Programs that a core has at once."""


@dataclass(frozen=True)
class Params:
    """frequencies: of a position. dtype: of the tables. form, scaling: as in the operation."""

    frequencies: int
    dtype: torch.dtype
    freq_dtype: torch.dtype
    position_dtype: torch.dtype
    form: str
    scaling: float

    def __post_init__(self) -> None:
        if self.frequencies < 1 or self.form not in FORMS:
            raise ValueError(f"{self.frequencies} frequencies, form {self.form!r}")

    @property
    def width(self) -> int:
        """Columns of a table."""
        return self.frequencies * (1 if self.form == "once" else 2)


@dataclass(frozen=True)
class Config:
    """block_t: positions of one program, a power of two."""

    block_t: int
    num_warps: int


def bind(call: Call) -> Params | Refused:
    """Params of a call of rotary_table."""
    given = call.arguments
    positions, inv_freq, dtype = given["position_ids"], given["inv_freq"], given["dtype"]
    if positions.dtype not in POSITIONS or inv_freq.dtype not in DTYPES or dtype not in DTYPES:
        return Refused(f"tables in {dtype} of {positions.dtype} positions and {inv_freq.dtype} frequencies")
    if inv_freq.dim() != 1 or not isinstance(inv_freq.shape[0], int):
        return Refused("the number of frequencies is not fixed")
    if positions.dim() < 1 or not all(statically_known_true(n == 1) for n in positions.shape[:-1]):
        return Refused("positions under more sizes than tokens")
    if not side_by_side(positions, inv_freq):
        return Refused("positions or frequencies do not lie side by side")
    return Params(inv_freq.shape[0], dtype, inv_freq.dtype, positions.dtype, given["form"], given["scaling"])


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """As many positions as keep all cores busy."""
    angles = next_power_of_2(params.frequencies)
    most = next_power_of_2(-(-tokens // (FULL * limits.cores)))
    block = max(b for b in BLOCKS if b == 1 or (b <= most and b * angles <= TILE))
    return Config(block, max(1, min(4, limits.max_warps, block * angles // 128)))


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Positions a program and warps."""
    for block, warps in product(BLOCKS, (1, 2, 4, 8)):
        if warps <= limits.max_warps and (block == 1 or block * next_power_of_2(params.frequencies) <= TILE):
            yield Config(block, warps)


def plan(params: Params, config: Config) -> LaunchPlan:
    """One launch."""
    name, tokens = type_name(params.dtype), ("size", "position_ids", -1)
    arguments = (
        pointer("position_ids", params.position_dtype, 1),
        pointer("inv_freq", params.freq_dtype, 1),
        pointer("cos", params.dtype),
        pointer("sin", params.dtype),
        Argument("tokens", "i32", tokens),
    )
    operands = (
        Operand("position_ids", type_name(params.position_dtype), (None,)),
        Operand("inv_freq", type_name(params.freq_dtype), (params.frequencies,)),
    )
    grid: tuple[Expr, ...] = (("cdiv", tokens, config.block_t),)
    results = tuple(Buffer(table, name, (tokens, params.width)) for table in ("cos", "sin"))
    return LaunchPlan(
        operands, results, (), (Launch("rotary_table", grid, arguments, {"num_warps": config.num_warps}),)
    )


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """One operation an element; positions and frequencies are read, tables written."""
    tokens = sum(new)
    elements = 2 * tokens * params.width
    read = tokens * params.position_dtype.itemsize + params.frequencies * params.freq_dtype.itemsize
    return Work(elements, read + elements * params.dtype.itemsize)


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Positions of a million at most, the first 0. Frequencies are powers of two, so that angles are not rounded and
    fp64 has the same."""
    params, tokens = case.params, sum(case.new)
    positions = torch.full((1, tokens + 2), -(1 << 30), dtype=params.position_dtype)
    inner = positions[:, 1:-1]
    inner.copy_(torch.randint(0, 1 << 20, inner.shape, generator=generator))
    inner[:, 0] = 0
    room = torch.full((params.frequencies + 2,), torch.nan, dtype=params.freq_dtype)
    inv_freq: Tensor = room[1:-1]
    inv_freq.copy_(2.0 ** -(torch.arange(params.frequencies) % 14))
    return {
        "position_ids": inner,
        "inv_freq": inv_freq,
        "scaling": params.scaling,
        "form": params.form,
        "dtype": params.dtype,
    }


def _case(name: str, tokens: int, **changes: Any) -> Case[Params]:
    usual = Params(16, torch.float32, torch.float32, torch.int64, "halves", 1.0)
    return Case(name, replace(usual, **changes), (tokens,), (tokens,))


BF16 = {"dtype": torch.bfloat16}
CASES = (
    _case("one", 2, frequencies=1, form="once"),
    _case("halves", 67, frequencies=37),
    _case("pairs", 5, frequencies=20, form="pairs", scaling=1.3465735902799727, position_dtype=torch.int32),
    _case("once", 130, frequencies=16, form="once", scaling=1.4142135623730951, **BF16),
    _case("stored", 33, frequencies=64, freq_dtype=torch.bfloat16, **BF16),
    _case("typical", 1, frequencies=32, **BF16),
    _case("largest", 8192, frequencies=64, **BF16),
)

SPECS = (
    KernelSpec(
        name="rotary_table",
        op=ops.ROTARY_TABLE,
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
        tolerance={torch.float32: 3e-7, torch.bfloat16: 2**-7},
    ),
)
