"""From one packed program to the programs of a bundle: prefill, decode, verify. They share caches and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deepinfer_compile.graph import is_op, tensor
from deepinfer_compile.ops import CACHED_LATENT_ATTENTION
from deepinfer_compile.pipeline import Observer, Pipeline, Record
from deepinfer_compile.presets import PHASES
from deepinfer_compile.program import Program


def phase_programs(
    packed: Program, settings: dict[str, Any], observers: Sequence[Observer] = ()
) -> tuple[dict[str, Program], dict[str, list[Record]]]:
    """Run each phase's passes on the packed program."""
    programs: dict[str, Program] = {}
    records: dict[str, list[Record]] = {}
    for name, passes in PHASES.items():
        start = replace(packed, name=name)
        programs[name], records[name] = Pipeline(passes, given=packed.facts).run(
            start, settings=settings, observers=observers
        )
    return programs, records


def crossover(program: Program) -> float:
    """Tokens per request above which expanded latent attention costs fewer FLOPs than absorbed, for long contexts.

    Per context row and head, n queries cost n(2 dl + dr) absorbed and dl(dn + dv) + n(dn + dr + dv) expanded (a
    multiply-add each); equal at n = dl(dn + dv) / (2 dl - dn - dv). Without latent attention the forms do not exist and
    the answer is 1: every step of more than one token a request is a prefill.
    """
    for gm in program.blocks.values():
        for node in gm.graph.nodes:
            if is_op(node, CACHED_LATENT_ATTENTION.overload):
                nope = int(tensor(node.args[4]).shape[1])  # type: ignore[arg-type]
                latent, value = (int(d) for d in tensor(node.args[5]).shape[1:])  # type: ignore[arg-type]
                saved = 2 * latent - nope - value
                return latent * (nope + value) / saved if saved > 0 else float(1 << 30)
    return 1.0
