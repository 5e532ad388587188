"""Every raising pass alone on the functional graphs of a program: what it gives must stay what it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import SymFloat, Tensor
from torch.fx import GraphModule, Node

from deepinfer_compile.backend import as_program, captured
from deepinfer_compile.errors import NotFunctional
from deepinfer_compile.match_moe import ancestors
from deepinfer_compile.passbase import Pass
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_activation import RaiseActivation
from deepinfer_compile.passes.raise_attention import RaiseAttention
from deepinfer_compile.passes.raise_experts import RaiseExperts
from deepinfer_compile.passes.raise_latent_attention import RaiseLatentAttention
from deepinfer_compile.passes.raise_rms_norm import RaiseRmsNorm
from deepinfer_compile.passes.raise_rope import RaiseRope
from deepinfer_compile.passes.raise_router import RaiseRouter
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.program import Program
from tests.property.checking import Report, close, eager_door

ALONE: dict[str, tuple[Pass, ...]] = {
    "norm": (RaiseRmsNorm(),),
    "rope": (RaiseRope(),),
    "router": (RaiseRouter(),),
    "experts": (RaiseExperts(),),
    "activation": (RaiseActivation(),),
    "attention": (RaiseAttention(packed=False),),
    "packed attention": (RaiseAttention(),),
    "latent": (RaiseAttention(packed=False), RaiseLatentAttention(short=True)),
}


def outputs(program: Program, values: list[Any]) -> list[Any]:
    """What a program gives for its inputs in order."""
    found = program.run(dict(zip((n.name for n in program.skeleton.graph.nodes if n.op == "placeholder"), values)))
    return list(found) if isinstance(found, (tuple, list)) else [found]


def outputs_of(gm: GraphModule) -> tuple[Any, ...]:
    """The outputs of a graph of one block, numbers among them."""
    (found,) = next(n for n in reversed(gm.graph.nodes) if n.op == "output").args
    return found if isinstance(found, tuple) else tuple(found)  # type: ignore[arg-type]


def narrowest(node: Any) -> torch.dtype:
    """Half precision if anything that an output is computed from has it."""
    held = [n.meta["val"] for n in ancestors(node)] if isinstance(node, Node) else []
    return torch.bfloat16 if any(isinstance(v, Tensor) and v.dtype == torch.bfloat16 for v in held) else torch.float32


def each_pass(gm: GraphModule, rewrites: Counter[str]) -> Callable[..., None]:
    """A function of a Dynamo graph's inputs that compares each pass's outputs with those before it.

    rewrites: how often each pass rewrote something, added to. Where none did, outputs are equal to the bit.
    """
    try:
        _, values, form = captured(gm)
    except NotFunctional:
        return lambda *args: None
    before, after, exact = as_program(form), {}, {}
    through = [narrowest(n) for n in outputs_of(form.gm)]
    for name, passes in ALONE.items():
        after[name], records = Pipeline((Canonicalize(), *passes), given=before.facts).run(before.clone())
        applied = sum(r.count("applied") for r in records[1:])
        exact[name] = not applied
        rewrites[name] += applied

    def compare(*args: Any) -> None:
        held = [a.item() if isinstance(v, SymFloat) else a for a, v in zip(args, values)] + list(form.constants)
        given = [h.clone() if isinstance(h, Tensor) else h for h in held]
        want = outputs(before, given)
        for name, program in after.items():
            for i, (a, b) in enumerate(zip(want, outputs(program, given), strict=True)):
                same = close(a, b, exact[name], through[i]) if isinstance(a, Tensor) else a == b
                assert same, f"pass {name}: output {i} is {b}, was {a}"

    return compare


def door_and_passes(rewrites: Counter[str]) -> Callable[[Report], Callable[..., Any]]:
    """The door that runs what Inductor would get, and compares each pass on the way."""

    def of(report: Report) -> Callable[..., Any]:
        prepared = eager_door(report)

        def door(gm: GraphModule, example_inputs: Any) -> Any:
            compare, graph = each_pass(gm, rewrites), prepared(gm, example_inputs)

            def run(*args: Any) -> Any:
                compare(*args)
                return graph(*args)

            return run

        return door

    return of
