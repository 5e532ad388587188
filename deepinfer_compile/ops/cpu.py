"""What tracing needs to know of the native CPU operations (`templates/cpu_*`): schemas and fake functions.

The native library defines the same schemas when it is loaded. Load it before `register_fakes` where both meet in one
process; without it (a bundle built for an instruction set that this machine lacks) the schemas come from here, and the
operations can be traced but not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer_compile.ops.streams import JOIN_STREAMS, MIX_STREAMS

NAMESPACE = "deepinfer_cpu"

SCHEMAS = {
    "linear": "linear(Tensor x, Tensor w, Tensor? b) -> Tensor",
    "linears": "linears(Tensor x, Tensor[] w, Tensor?[] b) -> Tensor[]",
    "cached_attention": (
        "cached_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) kv, Tensor query_start, Tensor seq_len, "
        "Tensor block_table, Tensor slot, float scale, int window, float softcap, Tensor? sinks) -> Tensor"
    ),
    "write_kv": "write_kv(Tensor k, Tensor v, Tensor(a!) kv, Tensor slot) -> Tensor",
    "shared_attention": (
        "shared_attention(Tensor q, Tensor kv, Tensor query_start, Tensor seq_len, Tensor block_table, Tensor slot, "
        "float scale, int window, float softcap, Tensor? sinks, int value_width) -> Tensor"
    ),
    "cached_latent_attention": (
        "cached_latent_attention(Tensor q_nope, Tensor q_rope, Tensor c, Tensor k_rope, Tensor w_uk, Tensor w_uv, "
        "Tensor(a!) latent, Tensor query_start, Tensor seq_len, Tensor block_table, Tensor slot, float scale, "
        "str form) -> Tensor"
    ),
    "experts": (
        "experts(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor w2, Tensor? b13, Tensor? b2, str act, "
        "float alpha, float limit, bool interleaved, bool transposed) -> Tensor"
    ),
    "mix_streams": (
        "mix_streams(Tensor streams, Tensor weight, Tensor base, Tensor scale, float norm_eps, int rounds, float eps) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    "join_streams": "join_streams(Tensor streams, Tensor y, Tensor post, Tensor comb) -> Tensor",
}
"""Operation name -> schema; shapes and meaning are those of the operation of the same name in the dialect."""

_libraries: dict[str, torch.library.Library] = {}


def _linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


def _linears(x: Tensor, w: Sequence[Tensor], b: Sequence[Tensor | None]) -> list[Tensor]:
    return [_linear(x, one, None) for one in w]


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def _write_kv(k: Tensor, v: Tensor, kv: Tensor, slot: Tensor) -> Tensor:
    return torch.empty_like(slot)


def _shared_attention(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], rest[-1]))


def _latent_attention(
    q_nope: Tensor, q_rope: Tensor, c: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor, *rest: object
) -> Tensor:
    return q_nope.new_empty(q_nope.shape[0], q_nope.shape[1], w_uv.shape[2])


def _experts(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, *rest: object) -> Tensor:
    transposed = rest[-1]
    return x.new_empty(x.shape[0], w2.shape[2 if transposed else 1])


_FAKES: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "linears": _linears,
    "cached_attention": _attention,
    "write_kv": _write_kv,
    "shared_attention": _shared_attention,
    "cached_latent_attention": _latent_attention,
    "experts": _experts,
    "mix_streams": MIX_STREAMS.fake,
    "join_streams": JOIN_STREAMS.fake,
}


def register_fakes(namespace: str = NAMESPACE) -> None:
    """Give every operation its fake function, so that torch.export and AOTInductor can trace calls of it. Idempotent.

    namespace: where the library registers its operations, which a build may choose.
    """
    if namespace in _libraries:
        return
    library = torch.library.Library(namespace, "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if not hasattr(getattr(torch.ops, namespace), name):
            library.define(schema)
        torch.library.register_fake(f"{namespace}::{name}", _FAKES[name], lib=library)
    _libraries[namespace] = library
