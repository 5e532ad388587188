"""Bundles on disk: their format, their integrity, and the weights in them.

`BundleWriter` writes one, `read_bundle` opens one. `plan_weights` says how a checkpoint provides a model's tensors.
"""

from deepinfer_compile.bundle.alias import Packed, pack
from deepinfer_compile.bundle.checkpoint import Checkpoint, DictSource, TensorSource
from deepinfer_compile.bundle.execute import execute, execute_into
from deepinfer_compile.bundle.ledger import LEDGER, Ledger
from deepinfer_compile.bundle.manifest import SCHEMA, Constant, Manifest, WeightSource
from deepinfer_compile.bundle.mapped import Spec, WeightItem, dtype_name, torch_dtype
from deepinfer_compile.bundle.reader import BundleFiles, read_bundle
from deepinfer_compile.bundle.recipes import Recipe, expected_inputs, infer
from deepinfer_compile.bundle.weight_files import WeightFiles
from deepinfer_compile.bundle.weights import (
    constants_table,
    plan_weights,
    reload_into,
    split_shards,
    weight_items,
    with_derived,
)
from deepinfer_compile.bundle.writer import BundleWriter

__all__ = [
    "LEDGER",
    "SCHEMA",
    "BundleFiles",
    "BundleWriter",
    "Checkpoint",
    "Constant",
    "DictSource",
    "Ledger",
    "Manifest",
    "Packed",
    "Recipe",
    "Spec",
    "TensorSource",
    "WeightFiles",
    "WeightItem",
    "WeightSource",
    "constants_table",
    "dtype_name",
    "execute",
    "execute_into",
    "expected_inputs",
    "infer",
    "pack",
    "plan_weights",
    "read_bundle",
    "reload_into",
    "split_shards",
    "torch_dtype",
    "weight_items",
    "with_derived",
]
