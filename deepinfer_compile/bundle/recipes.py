"""Recipes: how one runtime tensor follows from checkpoint tensors, as data.

A recipe is a JSON object with an `op`; operands are checkpoint names or recipes:

    copy       {"op": "copy", "of": NAME}
    cast       {"op": "cast", "to": DTYPE, "of": X}                        between real floating dtypes of 16 to 64 bits
    fp8_block  {"op": "fp8_block", "of": NAME, "scale": NAME, "block": [bn, bk], "layout": "row" | "column"} -> float32
    mxfp4      {"op": "mxfp4", "blocks": NAME, "scales": NAME}             -> bfloat16, which holds each value exactly
    stack      {"op": "stack", "of": [X, ...], "dim": d}
    concat     {"op": "concat", "of": [X, ...], "dim": d}
    transpose  {"op": "transpose", "of": X, "dims": [a, b]}
    tied       {"op": "tied", "of": [X, ...]}                              those present are equal; the first is used

`infer` proves dtype, shape and presence from headers alone, so a loader can refuse before it reads or writes anything.
`execute_into` writes straight into the destination's slices: no intermediate of a weight's size is made, except below a
cast of a cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepinfer_compile.bundle import dequant
from deepinfer_compile.bundle.checkpoint import TensorSource
from deepinfer_compile.bundle.mapped import Spec, describe_spec, torch_dtype
from deepinfer_compile.errors import BundleCorrupt, MissingWeight, TiedWeightConflict, WeightMismatch

Recipe = dict[str, Any]
Operand = str | Recipe

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_DEPTH = 16

_KEYS = {
    "copy": {"of"},
    "cast": {"to", "of"},
    "fp8_block": {"of", "scale", "block", "layout"},
    "mxfp4": {"blocks", "scales"},
    "stack": {"of", "dim"},
    "concat": {"of", "dim"},
    "transpose": {"of", "dims"},
    "tied": {"of"},
}


def validate(recipe: Any, name: str, depth: int = 0) -> Recipe:
    """Check the form of a recipe that comes from a file; `name` is the runtime tensor. Raises BundleCorrupt."""

    def bad(reason: str) -> BundleCorrupt:
        return BundleCorrupt(file="ledger.json", reason=f"the recipe of {name!r}: {reason}")

    op = recipe.get("op") if isinstance(recipe, dict) else None
    if not isinstance(op, str) or op not in _KEYS or depth > MAX_DEPTH:
        raise bad("it is not an object with a known op, or it is nested too deeply")
    if set(recipe) != _KEYS[op] | {"op"}:
        raise bad(f"op {op} does not have the keys {sorted(recipe)}")
    reason = _bad_fields(recipe)
    if reason:
        raise bad(reason)
    for item in operands(recipe):
        if isinstance(item, dict):
            validate(item, name, depth + 1)
        elif not isinstance(item, str):
            raise bad("an operand is neither a name nor a recipe")
    return dict(recipe)


def _bad_fields(recipe: Recipe) -> str:
    """What is wrong with the fields that are not operands, or ""."""
    op = recipe["op"]
    if op in ("stack", "concat", "tied") and (not isinstance(recipe["of"], list) or not recipe["of"]):
        return f"op {op} needs a list of operands"
    names = ("of", "scale") if op in ("copy", "fp8_block") else ("blocks", "scales")
    if not all(isinstance(recipe.get(key, ""), str) for key in names if op in ("copy", "fp8_block", "mxfp4")):
        return f"op {op} reads checkpoint tensors, by name"
    if op in ("cast", "transpose") and not isinstance(recipe["of"], str | dict):
        return f"op {op} needs one operand"
    if "dim" in recipe and not _whole(recipe["dim"]):
        return "dim is not a whole number"
    if "to" in recipe and recipe["to"] not in ("float16", "bfloat16", "float32", "float64"):
        return f"cannot cast to {recipe['to']!r}"
    if "dims" in recipe and not _pair(recipe["dims"], 0):
        return "dims is not a pair of dimensions"
    if op == "fp8_block" and not (_pair(recipe["block"], 1) and recipe["layout"] in dequant.LAYOUTS):
        return "block is not a pair of sizes, or layout is neither row nor column"
    return ""


def _whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _pair(value: Any, least: int) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_whole(item, least) for item in value)


def operands(recipe: Recipe) -> list[Any]:
    """The direct operands: checkpoint names and recipes."""
    named = [recipe[key] for key in ("scale", "blocks", "scales") if key in recipe]
    of = recipe.get("of", [])
    return (list(of) if isinstance(of, list) else [of]) + named


def expected_inputs(recipe: Operand) -> list[str]:
    """Every checkpoint name the recipe can read, in order, each once."""
    return list(dict.fromkeys(_names(recipe)))


def _names(recipe: Operand) -> Iterator[str]:
    if isinstance(recipe, str):
        yield recipe
        return
    for item in operands(recipe):
        yield from _names(item)


def is_present(recipe: Operand, source: TensorSource) -> bool:
    """Whether the source has what the recipe needs."""
    if isinstance(recipe, str):
        return recipe in source
    some = any if recipe["op"] == "tied" else all
    return some(is_present(item, source) for item in operands(recipe))


def present(recipe: Recipe, source: TensorSource) -> list[Operand]:
    """The operands of a tied recipe that the source has. Raises MissingWeight if there is none."""
    found = [item for item in recipe["of"] if is_present(item, source)]
    if not found:
        raise MissingWeight(tensor=next(_names(recipe)))
    return found


def infer(recipe: Operand, source: TensorSource) -> Spec:
    """The dtype and shape of the result, from headers only. Raises WeightMismatch, MissingWeight."""
    if isinstance(recipe, str):
        return source.spec(recipe)
    return _INFER[recipe["op"]](recipe, source)


def _infer_copy(recipe: Recipe, source: TensorSource) -> Spec:
    return infer(recipe["of"], source)


def _infer_cast(recipe: Recipe, source: TensorSource) -> Spec:
    dtype, shape = infer(recipe["of"], source)
    if dtype not in FLOATS:
        raise _mismatch(recipe, f"a floating tensor to cast to {recipe['to']}", describe_spec((dtype, shape)))
    return torch_dtype(recipe["to"]), shape


def _infer_fp8_block(recipe: Recipe, source: TensorSource) -> Spec:
    dtype, shape = source.spec(recipe["of"])
    if dtype not in dequant.FP8_DTYPES or len(shape) < 2:
        raise _mismatch(recipe, "an FP8 matrix", describe_spec((dtype, shape)))
    scale_dtype, scale_shape = source.spec(recipe["scale"])
    block = (recipe["block"][0], recipe["block"][1])
    grid, stored = dequant.grid_shape(shape, block), dequant.stored_grid_shape(shape, block, recipe["layout"])
    single = scale_shape in ((), (1,)) and set(grid) == {1}
    # A tensor in memory may hold a column grid through its strides; those are checked when it is read.
    by_stride = recipe["layout"] == "column" and scale_shape == grid
    if scale_dtype not in dequant.SCALE_DTYPES or not (scale_shape == stored or single or by_stride):
        expected = f"scales {list(stored)} in {recipe['layout']} order, block {list(block)}"
        raise WeightMismatch(tensor=recipe["scale"], expected=expected, found=describe_spec((scale_dtype, scale_shape)))
    return torch.float32, shape


def _infer_mxfp4(recipe: Recipe, source: TensorSource) -> Spec:
    (blocks_dtype, blocks), (scale_dtype, scales) = source.spec(recipe["blocks"]), source.spec(recipe["scales"])
    half = dequant.MX_GROUP // 2
    dtypes_fit = blocks_dtype in (torch.uint8, torch.int8) and scale_dtype in (torch.uint8, torch.float8_e8m0fnu)
    if not dtypes_fit or not scales or blocks not in ((*scales, half), (*scales[:-1], scales[-1] * half)):
        found = f"{describe_spec((blocks_dtype, blocks))} and {describe_spec((scale_dtype, scales))}"
        raise _mismatch(recipe, "MXFP4 blocks u8[..., G, 16] or u8[..., G * 16] and scales u8[..., G]", found)
    return torch.bfloat16, (*scales[:-1], scales[-1] * dequant.MX_GROUP)


def _infer_stack(recipe: Recipe, source: TensorSource) -> Spec:
    specs = [infer(item, source) for item in recipe["of"]]
    dtype, shape = specs[0]
    if any(spec != specs[0] for spec in specs) or recipe["dim"] > len(shape):
        raise _mismatch(recipe, "equal tensors to stack", ", ".join(sorted({describe_spec(spec) for spec in specs})))
    dim = recipe["dim"]
    return dtype, (*shape[:dim], len(specs), *shape[dim:])


def _infer_concat(recipe: Recipe, source: TensorSource) -> Spec:
    specs, dim = [infer(item, source) for item in recipe["of"]], recipe["dim"]
    rest = {(dtype, shape[:dim], shape[dim + 1 :]) for dtype, shape in specs}
    if len(rest) != 1 or any(dim >= len(shape) for _, shape in specs):
        raise _mismatch(recipe, f"tensors to join along {dim}", ", ".join(describe_spec(spec) for spec in specs))
    dtype, shape = specs[0]
    return dtype, (*shape[:dim], sum(spec[1][dim] for spec in specs), *shape[dim + 1 :])


def _infer_transpose(recipe: Recipe, source: TensorSource) -> Spec:
    dtype, shape = infer(recipe["of"], source)
    first, second = recipe["dims"]
    if max(first, second) >= len(shape):
        raise _mismatch(recipe, f"a tensor with dimensions {first} and {second}", describe_spec((dtype, shape)))
    order = list(shape)
    order[first], order[second] = order[second], order[first]
    return dtype, tuple(order)


def _infer_tied(recipe: Recipe, source: TensorSource) -> Spec:
    found = present(recipe, source)
    specs = [infer(item, source) for item in found]
    if any(spec != specs[0] for spec in specs):
        raise TiedWeightConflict(names=" and ".join(_names(recipe)))
    return specs[0]


def _mismatch(recipe: Recipe, expected: str, found: str) -> WeightMismatch:
    return WeightMismatch(tensor=next(_names(recipe)), expected=expected, found=found)


_INFER: dict[str, Callable[[Recipe, TensorSource], Spec]] = {
    "copy": _infer_copy,
    "cast": _infer_cast,
    "fp8_block": _infer_fp8_block,
    "mxfp4": _infer_mxfp4,
    "stack": _infer_stack,
    "concat": _infer_concat,
    "transpose": _infer_transpose,
    "tied": _infer_tied,
}
