"""The pipelines as literal tuples: reading this file is reading the compiler.

RAISE turns ATen into the dialect. PACK turns one sequence into packed requests with caches, and proves that they cannot
see each other. PHASES says how the programs of a bundle differ. What a target adds (`Target.prepare`) comes after.
"""

from __future__ import annotations

from deepinfer_compile.passbase import Pass
from deepinfer_compile.passes.bind_positions import BindPositions
from deepinfer_compile.passes.cache_attention import CacheAttention
from deepinfer_compile.passes.cache_selected import CacheSelected
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.choose_latent_form import ChooseLatentForm
from deepinfer_compile.passes.fuse_add_norm import FuseAddNorm
from deepinfer_compile.passes.fuse_linear_casts import FuseLinearCasts
from deepinfer_compile.passes.fuse_partial_rope import FusePartialRope
from deepinfer_compile.passes.keep_last_rows import KeepLastRows
from deepinfer_compile.passes.narrow_casts import NarrowCasts
from deepinfer_compile.passes.narrow_decoder import NarrowDecoder
from deepinfer_compile.passes.partition_experts import PartitionExperts
from deepinfer_compile.passes.prove_rowwise import ProveRowwise
from deepinfer_compile.passes.raise_activation import RaiseActivation
from deepinfer_compile.passes.raise_attention import RaiseAttention
from deepinfer_compile.passes.raise_experts import RaiseExperts
from deepinfer_compile.passes.raise_hyper_connections import RaiseHyperConnections
from deepinfer_compile.passes.raise_latent_attention import RaiseLatentAttention
from deepinfer_compile.passes.raise_output_projection import RaiseOutputProjection
from deepinfer_compile.passes.raise_packed_rows import RaisePackedRows
from deepinfer_compile.passes.raise_recent import RaiseRecent
from deepinfer_compile.passes.raise_rms_norm import RaiseRmsNorm
from deepinfer_compile.passes.raise_rope import RaiseRope
from deepinfer_compile.passes.raise_rotary_table import RaiseRotaryTable
from deepinfer_compile.passes.raise_router import RaiseRouter
from deepinfer_compile.passes.raise_selected_attention import RaiseSelectedAttention
from deepinfer_compile.passes.share_rotary_tables import ShareRotaryTables
from deepinfer_compile.passes.split_encoder_decoder import SplitEncoderDecoder
from deepinfer_compile.pipeline import Pipeline

RAISE: tuple[Pass, ...] = (
    Canonicalize(),
    RaiseRmsNorm(),
    RaiseRope(),
    RaiseRotaryTable(),
    RaiseRouter(),
    RaiseExperts(),
    RaiseActivation(),
    RaiseAttention(),
    RaiseLatentAttention(require=True),
    RaiseRecent(),
    RaisePackedRows(),
    RaiseSelectedAttention(),
    RaiseHyperConnections(),
    BindPositions(),
    RaiseOutputProjection(),
)

PACK: tuple[Pass, ...] = (
    SplitEncoderDecoder(require=False),
    CacheAttention(),
    CacheSelected(),
    ProveRowwise(),
    FuseAddNorm(),
    NarrowCasts(),
    FuseLinearCasts(),
    FusePartialRope(),
    ShareRotaryTables(),
)

PHASES: dict[str, tuple[Pass, ...]] = {
    "prefill": (ChooseLatentForm(form="expanded"), KeepLastRows(), NarrowDecoder(), PartitionExperts(form="exact")),
    "decode": (ChooseLatentForm(form="absorbed"), PartitionExperts(form="static")),
    "verify": (ChooseLatentForm(form="absorbed"), PartitionExperts(form="static")),
}


BACKEND: tuple[Pass, ...] = (
    Canonicalize(),
    RaiseRmsNorm(),
    RaiseRope(),
    RaiseRotaryTable(),
    RaiseRouter(),
    RaiseExperts(),
    RaiseActivation(),
    RaiseAttention(packed=False),
    RaiseLatentAttention(short=True),
)
"""For torch.compile: nothing is known of positions, lengths or caches."""


def default() -> Pipeline:
    """From a captured program to one with caches."""
    return Pipeline((*RAISE, *PACK))
