"""The dialect `deepinfer::*`: the operations that passes raise to and kernels implement. One file a family."""

from deepinfer_compile.ops.activation import GATED_ACT
from deepinfer_compile.ops.attention import ATTENTION, CACHED_ATTENTION, MERGE_ATTENTION
from deepinfer_compile.ops.latent import CACHED_LATENT_ATTENTION, LATENT_ATTENTION
from deepinfer_compile.ops.moe import EXPERTS, ROUTE
from deepinfer_compile.ops.norm import ADD_RMS_NORM, RMS_NORM
from deepinfer_compile.ops.packed import PACK_ROWS, UNPACK_ROWS
from deepinfer_compile.ops.parallel import COMBINE, DISPATCH
from deepinfer_compile.ops.project import LINEAR, LINEARS, OUTPUT_PROJECTION, WIDE_LINEAR
from deepinfer_compile.ops.registry import NAMESPACE, OPS, Op, Work, find, implements
from deepinfer_compile.ops.rope import COMPLEX_ROPE_TABLE, PARTIAL_ROPE, ROPE, ROTARY_TABLE
from deepinfer_compile.ops.sample import SAMPLE
from deepinfer_compile.ops.selected import (
    CACHED_RECENT,
    CACHED_SELECT_ROWS,
    CACHED_SELECTED_ATTENTION,
    RECENT,
    SELECT_ROWS,
    SELECTED_ATTENTION,
    WRITE_ROWS,
)
from deepinfer_compile.ops.shared import KEPT_BATCH, ROW_BATCH, SHARED_ATTENTION, WRITE_KV
from deepinfer_compile.ops.streams import BALANCE_STREAMS, COLLAPSE_STREAMS, JOIN_STREAMS, MIX_STREAMS

__all__ = [
    "ADD_RMS_NORM",
    "ATTENTION",
    "BALANCE_STREAMS",
    "CACHED_ATTENTION",
    "CACHED_LATENT_ATTENTION",
    "CACHED_RECENT",
    "CACHED_SELECTED_ATTENTION",
    "CACHED_SELECT_ROWS",
    "COLLAPSE_STREAMS",
    "COMBINE",
    "COMPLEX_ROPE_TABLE",
    "DISPATCH",
    "EXPERTS",
    "GATED_ACT",
    "JOIN_STREAMS",
    "KEPT_BATCH",
    "LATENT_ATTENTION",
    "LINEAR",
    "LINEARS",
    "MERGE_ATTENTION",
    "MIX_STREAMS",
    "NAMESPACE",
    "OPS",
    "OUTPUT_PROJECTION",
    "PACK_ROWS",
    "PARTIAL_ROPE",
    "RECENT",
    "RMS_NORM",
    "ROPE",
    "ROTARY_TABLE",
    "ROUTE",
    "ROW_BATCH",
    "SAMPLE",
    "SELECTED_ATTENTION",
    "SELECT_ROWS",
    "SHARED_ATTENTION",
    "UNPACK_ROWS",
    "WIDE_LINEAR",
    "WRITE_KV",
    "WRITE_ROWS",
    "Op",
    "Work",
    "find",
    "implements",
]
