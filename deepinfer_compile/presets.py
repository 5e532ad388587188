"""The pipelines as literal tuples: reading this file is reading the compiler.

RAISE turns ATen into the dialect. PACK turns one sequence into packed requests with caches. PHASES says how the programs
of a bundle differ. What a target adds (`Target.lowering`) comes after.
"""

from __future__ import annotations

from deepinfer_compile.passbase import Pass
from deepinfer_compile.passes.cache_attention import CacheAttention
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.pipeline import Pipeline

RAISE: tuple[Pass, ...] = (Canonicalize(),)

PACK: tuple[Pass, ...] = (CacheAttention(),)

PHASES: dict[str, tuple[Pass, ...]] = {
    "prefill": (),
    "decode": (),
    "verify": (),
}


def default() -> Pipeline:
    """From a captured program to one with caches."""
    return Pipeline((*RAISE, *PACK))
