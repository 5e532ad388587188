"""The exact form of a program: every floating type widened to fp64.

Two stages of a pipeline that mean the same function agree in fp64 to about 1e-12, whatever they are computed in; a
wrong epsilon or a missing term shows at once. So algebra is proven on the exact form, and rounding on the original one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from deepinfer_compile.graph import copy_module
from deepinfer_compile.program import Program

NARROW = (torch.float32, torch.bfloat16, torch.float16)
COMPLEX = {torch.complex64: torch.complex128}


def exact_program(program: Program) -> Program:
    """The program with fp64 in place of every narrower floating type. For running only: recorded values are stale."""
    blocks = {name: _exact_graph(gm) for name, gm in program.blocks.items()}
    caches = tuple(replace(c, dtype=_exact_type(c.dtype)) for c in program.caches)
    weights = {
        name: replace(r, value=None if r.value is None else exact_tensor(r.value))
        for name, r in program.weights.items()
    }
    return replace(program, skeleton=copy_module(program.skeleton), blocks=blocks, caches=caches, weights=weights)


def exact_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in fp64."""
    return {name: exact_tensor(t) for name, t in weights.items()}


def exact_tensor(t: Tensor) -> Tensor:
    """One tensor in fp64 (complex128) if it is floating."""
    return t.to(_exact_type(t.dtype))


def _exact_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in NARROW else COMPLEX.get(dtype, dtype)


def _exact_graph(gm: GraphModule) -> GraphModule:
    new = copy_module(gm)

    def widen(arg: Any) -> Any:
        return _exact_type(arg) if isinstance(arg, torch.dtype) else arg

    for node in new.graph.nodes:
        if node.op == "call_function":
            node.args = tuple(map(widen, node.args))
            node.kwargs = {k: widen(v) for k, v in node.kwargs.items()}
    new.recompile()
    return new
