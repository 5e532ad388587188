"""Running recipes: reading checkpoint tensors and writing runtime tensors.

See `recipes.py` for what a recipe is. Checking and writing are apart, so that a reload can check every tensor before it
writes the first one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer_compile.bundle import dequant
from deepinfer_compile.bundle.checkpoint import TensorSource
from deepinfer_compile.bundle.mapped import torch_dtype
from deepinfer_compile.bundle.recipes import Operand, Recipe, expected_inputs, infer, operands, present
from deepinfer_compile.errors import TiedWeightConflict


def execute(recipe: Operand, source: TensorSource) -> Tensor:
    """The tensor of a recipe. A plain copy is the source's own tensor, not copied: do not write to it.

    Raises WeightMismatch, MissingWeight, TiedWeightConflict.
    """
    dtype, shape = infer(recipe, source)
    check_values(recipe, source)
    plain = _plain_name(recipe, source)
    if plain is not None:
        return source.tensor(plain)
    out = torch.empty(shape, dtype=dtype)
    execute_into(recipe, source, out)
    return out


def _plain_name(recipe: Operand, source: TensorSource) -> str | None:
    """The checkpoint tensor that is the result as it stands, or None."""
    if isinstance(recipe, str):
        return recipe
    if recipe["op"] == "copy":
        return _plain_name(recipe["of"], source)
    if recipe["op"] == "tied":
        return _plain_name(present(recipe, source)[0], source)
    return None


def execute_into(recipe: Operand, source: TensorSource, out: Tensor) -> None:
    """Write the result into `out`, which has its shape; a cast on the way is done by the write.

    Call `infer` and `check_values` first: after them nothing here fails.
    """
    with torch.inference_mode():
        _into(recipe, source, out)


def check_values(recipe: Operand, source: TensorSource) -> None:
    """Check what headers do not show: that tied operands are equal, and that scale grids lie in memory as declared.

    Raises TiedWeightConflict, WeightMismatch.
    """
    if isinstance(recipe, str):
        return
    if recipe["op"] == "tied":
        _check_tied(recipe, source)
        return
    if recipe["op"] == "fp8_block":
        weight, scale = source.tensor(recipe["of"]), source.tensor(recipe["scale"])
        dequant.scale_grid(weight, scale, _block(recipe), recipe["layout"], recipe["scale"])
        return
    for item in operands(recipe):
        check_values(item, source)


def _check_tied(recipe: Recipe, source: TensorSource) -> None:
    found = present(recipe, source)
    for item in found:
        check_values(item, source)
    if len(found) == 1:
        return
    first = execute(found[0], source)
    if not all(same_bits(first, execute(item, source)) for item in found[1:]):
        raise TiedWeightConflict(names=" and ".join(expected_inputs(recipe)))


def _block(recipe: Recipe) -> tuple[int, int]:
    return recipe["block"][0], recipe["block"][1]


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes (so NaN equals itself and -0 is not 0)."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.numel() == 0:
        return True
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(left, right)


def _into(recipe: Operand, source: TensorSource, out: Tensor) -> None:
    if isinstance(recipe, str):
        out.copy_(source.tensor(recipe))
    else:
        _INTO[recipe["op"]](recipe, source, out)


def _copy_into(recipe: Recipe, source: TensorSource, out: Tensor) -> None:
    _into(recipe["of"], source, out)


def _cast_into(recipe: Recipe, source: TensorSource, out: Tensor) -> None:
    if out.dtype == torch_dtype(recipe["to"]):
        _into(recipe["of"], source, out)
        return
    # A cast above this one: round to this dtype first.
    middle = torch.empty(out.shape, dtype=torch_dtype(recipe["to"]))
    _into(recipe["of"], source, middle)
    out.copy_(middle)


def _fp8_block_into(recipe: Recipe, source: TensorSource, out: Tensor) -> None:
    weight, scale = source.tensor(recipe["of"]), source.tensor(recipe["scale"])
    dequant.fp8_block_into(out, weight, scale, _block(recipe), recipe["layout"], recipe["scale"])


def _mxfp4_into(recipe: Recipe, source: TensorSource, out: Tensor) -> None:
    dequant.mxfp4_into(out, source.tensor(recipe["blocks"]), source.tensor(recipe["scales"]), recipe["blocks"])


def _stack_into(recipe: Recipe, source: TensorSource, out: Tensor) -> None:
    for index, item in enumerate(recipe["of"]):
        _into(item, source, out.select(recipe["dim"], index))


def _concat_into(recipe: Recipe, source: TensorSource, out: Tensor) -> None:
    start, dim = 0, recipe["dim"]
    for item in recipe["of"]:
        size = infer(item, source)[1][dim]
        _into(item, source, out.narrow(dim, start, size))
        start += size


def _transpose_into(recipe: Recipe, source: TensorSource, out: Tensor) -> None:
    _into(recipe["of"], source, out.transpose(*recipe["dims"]))


def _tied_into(recipe: Recipe, source: TensorSource, out: Tensor) -> None:
    _into(present(recipe, source)[0], source, out)


_INTO: dict[str, Callable[[Recipe, TensorSource, Tensor], None]] = {
    "copy": _copy_into,
    "cast": _cast_into,
    "fp8_block": _fp8_block_into,
    "mxfp4": _mxfp4_into,
    "stack": _stack_into,
    "concat": _concat_into,
    "transpose": _transpose_into,
    "tied": _tied_into,
}
