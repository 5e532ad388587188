"""Recipes against independent arithmetic and against the loaders of Transformers (GEN-2)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from deepinfer_compile.bundle import DictSource, dequant, execute, execute_into, expected_inputs, infer
from deepinfer_compile.bundle.execute import same_bits
from deepinfer_compile.bundle.recipes import validate
from deepinfer_compile.errors import BundleCorrupt, MissingWeight, TiedWeightConflict, WeightMismatch

FP8 = torch.float8_e4m3fn


def copy(name: str) -> dict[str, Any]:
    return {"op": "copy", "of": name}


def fp8(block: tuple[int, int] = (128, 128), layout: str = "row") -> dict[str, Any]:
    return {"op": "fp8_block", "of": "w", "scale": "s", "block": list(block), "layout": layout}


def random_fp8(*shape: int, seed: int = 0) -> torch.Tensor:
    """Every finite bit pattern, at random."""
    bits = torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return torch.where(bits == 127, torch.zeros_like(bits), bits).view(FP8)


def slow_fp8(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Element by element."""
    out = torch.empty(weight.shape, dtype=torch.float32)
    for index in itertools.product(*(range(size) for size in weight.shape)):
        at = (*index[:-2], index[-2] // block[0], index[-1] // block[1])
        out[index] = weight[index].float() * scale[at].float()
    return out


# -- GEN-2 ------------------------------------------------------------------------------------------------------------

SCALES = torch.tensor([[1.0, 2], [3, 4]])


def test_GEN_2_blocks_are_where_they_are() -> None:
    scales = torch.arange(1.0, 9).reshape(4, 2)
    out = execute(fp8(), DictSource({"w": torch.ones(512, 256).to(FP8), "s": scales}))
    assert out[0, 128] == 2
    assert out[128, 0] == 3
    assert torch.equal(out, scales.repeat_interleave(128, 0).repeat_interleave(128, 1))
    square = execute(fp8(), DictSource({"w": torch.ones(256, 256).to(FP8), "s": SCALES}))
    assert square[0, 128] == 2
    assert square[128, 0] == 3


def test_GEN_2_column_order_is_declared() -> None:
    """The same grid stored column by column, as a transposed tensor and as strides."""
    weight = torch.ones(256, 256).to(FP8)
    for scale in (SCALES.t().contiguous(), SCALES):
        expected = SCALES if scale is not SCALES else SCALES.t()
        out = execute(fp8(layout="column"), DictSource({"w": weight, "s": scale}))
        assert torch.equal(out[::128, ::128], expected)
    by_stride = torch.empty_strided((2, 3), (1, 2)).copy_(torch.arange(6.0).reshape(2, 3))
    out = execute(fp8(layout="column"), DictSource({"w": torch.ones(256, 384).to(FP8), "s": by_stride}))
    assert torch.equal(out[::128, ::128], torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize(
    ("layout", "weight", "scale"),
    [
        ("row", torch.ones(256, 256).to(FP8), SCALES.t()),
        ("row", torch.ones(512, 256).to(FP8).t(), torch.ones(2, 4)),
        ("row", torch.ones(256, 256).to(FP8).t(), SCALES),
        ("row", torch.ones(512, 256).to(FP8), torch.ones(2, 4)),
        ("row", torch.ones(512, 256).to(FP8), torch.ones(8)),
        ("row", torch.ones(512, 256).to(FP8), torch.ones(4, 2, dtype=torch.int32)),
        ("column", torch.ones(512, 256).to(FP8), torch.ones(4, 2)),
        ("row", torch.ones(512, 256), torch.ones(4, 2)),
        ("row", torch.ones(256).to(FP8), torch.ones(2)),
    ],
)
def test_GEN_2_other_order_or_shape_is_refused(layout: str, weight: torch.Tensor, scale: torch.Tensor) -> None:
    with pytest.raises(WeightMismatch, match=r"'[ws]'"):
        execute(fp8(layout=layout), DictSource({"w": weight, "s": scale}))


@pytest.mark.parametrize("block", [(128, 128), (32, 32), (4, 3), (1, 5), (7, 1)])
@pytest.mark.parametrize("shape", [(1, 1), (33, 17), (2, 5, 9), (0, 4), (4, 0)])
@pytest.mark.parametrize("layout", ["row", "column"])
def test_ragged_blocks(block: tuple[int, int], shape: tuple[int, ...], layout: str) -> None:
    weight = random_fp8(*shape)
    scale = torch.rand(dequant.grid_shape(shape, block), generator=torch.Generator().manual_seed(1)) + 0.5
    stored = scale if layout == "row" else scale.transpose(-1, -2).contiguous()
    out = execute(fp8(block, layout), DictSource({"w": weight, "s": stored}))
    assert torch.equal(out, slow_fp8(weight, scale, block))


@pytest.mark.parametrize("strip", [1, 40])
def test_strips_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, strip: int) -> None:
    source = DictSource({"w": random_fp8(3, 33, 17), "s": torch.rand(3, 9, 6)})
    whole = execute(fp8((4, 3)), source)
    monkeypatch.setattr(dequant, "_STRIP", strip)
    assert torch.equal(execute(fp8((4, 3)), source), whole)


@pytest.mark.parametrize("single", [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]])])
def test_one_scale_for_the_tensor(single: torch.Tensor) -> None:
    weight = random_fp8(5, 7)
    out = execute(fp8((5, 7)), DictSource({"w": weight, "s": single}))
    assert torch.equal(out, weight.float() * 0.5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("block", [(32, 32), (128, 128), (1, 32)])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float32, torch.float16])
def test_power_of_two_scales_equal_transformers(dtype: torch.dtype, block: tuple[int, int], to: torch.dtype) -> None:
    fine = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight = random_fp8(256, 256)
    bits = torch.randint(110, 140, dequant.grid_shape((256, 256), block), dtype=torch.uint8)
    recipe = {"op": "cast", "to": str(to).removeprefix("torch."), "of": fp8(block)}
    out = execute(recipe, DictSource({"w": weight, "s": bits.view(dtype)}))
    expected = fine.Fp8Dequantize(None)._dequantize_one(weight, bits.view(dtype), output_dtype=to)
    assert same_bits(out, expected)


def test_float_scales_equal_transformers() -> None:
    fine = pytest.importorskip("transformers.integrations.finegrained_fp8")
    for scale_dtype in (torch.float32, torch.bfloat16):
        weight, scale = random_fp8(2, 256, 384), torch.rand(2, 2, 3).to(scale_dtype)
        recipe = {"op": "cast", "to": "bfloat16", "of": fp8()}
        out = execute(recipe, DictSource({"w": weight, "s": scale}))
        assert same_bits(out, fine.Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=torch.bfloat16))


# -- MXFP4 ------------------------------------------------------------------------------------------------------------

MXFP4 = {"op": "mxfp4", "blocks": "b", "scales": "s"}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def slow_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows = []
    for packed, scale in zip(blocks.reshape(-1, 16).tolist(), scales.reshape(-1).tolist(), strict=True):
        nibbles = [nibble for byte in packed for nibble in (byte & 15, byte >> 4)]
        values = [(-1.0 if nibble & 8 else 1.0) * E2M1[nibble & 7] for nibble in nibbles]
        rows.append([value * 2.0 ** (scale - 127) for value in values])
    flat = torch.tensor(rows, dtype=torch.float64).reshape(*scales.shape[:-1], scales.shape[-1] * 32)
    return flat.to(torch.bfloat16)


@pytest.mark.parametrize("prefix", [(), (1,), (3, 5), (2, 1, 7)])
@pytest.mark.parametrize("groups", [1, 3])
def test_mxfp4_by_hand(prefix: tuple[int, ...], groups: int) -> None:
    gen = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*prefix, groups, 16), generator=gen, dtype=torch.uint8)
    scales = torch.randint(0, 254, (*prefix, groups), generator=gen, dtype=torch.uint8)
    expected = slow_mxfp4(blocks, scales)
    assert same_bits(execute(MXFP4, DictSource({"b": blocks, "s": scales})), expected)
    flat = blocks.reshape(*prefix, groups * 16).view(torch.int8)
    assert same_bits(execute(MXFP4, DictSource({"b": flat, "s": scales.view(torch.float8_e8m0fnu)})), expected)


def test_mxfp4_extremes() -> None:
    """Each of 16 codes at the smallest, unit and largest scale; 255 is NaN."""
    codes = torch.arange(16, dtype=torch.uint8) | (torch.arange(16, dtype=torch.uint8) << 4)
    for scale in (0, 127, 252):
        out = execute(MXFP4, DictSource({"b": codes.reshape(1, 16), "s": torch.tensor([scale], dtype=torch.uint8)}))
        signed = [*E2M1, *(-value for value in E2M1)]
        assert out.tolist() == [value * 2.0 ** (scale - 127) for value in signed for _ in range(2)]
    out = execute(MXFP4, DictSource({"b": codes.reshape(1, 16), "s": torch.tensor([255], dtype=torch.uint8)}))
    assert out.isnan().all()


def test_mxfp4_equals_transformers_with_its_transpose() -> None:
    mx = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (3, 10, 2), dtype=torch.uint8)
    out = execute({"op": "transpose", "of": MXFP4, "dims": [1, 2]}, DictSource({"b": blocks, "s": scales}))
    assert out.shape == (3, 64, 10)
    assert out.is_contiguous()
    assert same_bits(out, mx.convert_moe_packed_tensors(blocks, scales))


def test_packed_fp4_equals_transformers() -> None:
    fine = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight = torch.randint(-128, 128, (6, 32), dtype=torch.int8)
    scales = torch.randint(120, 135, (6, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    out = execute(MXFP4, DictSource({"b": weight, "s": scales}))
    assert same_bits(out, fine.Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [
        (torch.zeros(4, 2, 15, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)),
        (torch.zeros(4, 2, 16, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)),
        (torch.zeros(4, 2, 16), torch.zeros(4, 2, dtype=torch.uint8)),
        (torch.zeros(4, 2, 16, dtype=torch.uint8), torch.zeros(4, 2)),
        (torch.zeros(16, dtype=torch.uint8), torch.tensor(1, dtype=torch.uint8)),
    ],
)
def test_mxfp4_mismatch(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    with pytest.raises(WeightMismatch, match="'b'"):
        infer(MXFP4, DictSource({"b": blocks, "s": scales}))


# -- the other operations ---------------------------------------------------------------------------------------------

A = torch.arange(6.0).reshape(2, 3)
SOURCE = DictSource({"a": A, "b": A + 10, "c": A.to(torch.bfloat16), "i": torch.arange(3), "a2": A.clone()})


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (copy("a"), A),
        ({"op": "copy", "of": "i"}, torch.arange(3)),
        ({"op": "cast", "to": "float64", "of": "a"}, A.double()),
        ({"op": "stack", "of": ["a", "b"], "dim": 0}, torch.stack([A, A + 10])),
        ({"op": "stack", "of": ["a", "b"], "dim": 2}, torch.stack([A, A + 10], 2)),
        ({"op": "concat", "of": ["a", copy("b")], "dim": 0}, torch.cat([A, A + 10])),
        ({"op": "concat", "of": ["a", "b", "a"], "dim": 1}, torch.cat([A, A + 10, A], 1)),
        ({"op": "transpose", "of": "a", "dims": [0, 1]}, A.t()),
        ({"op": "tied", "of": ["a", "a2", "absent"]}, A),
        ({"op": "tied", "of": ["absent", copy("a")]}, A),
    ],
)
def test_operations(recipe: dict, expected: torch.Tensor) -> None:
    assert infer(recipe, SOURCE) == (expected.dtype, tuple(expected.shape))
    assert same_bits(execute(recipe, SOURCE), expected.contiguous())
    validate(recipe, "x")
    out = torch.full((*expected.shape, 2), -1, dtype=expected.dtype)[..., 0]
    execute_into(recipe, SOURCE, out)
    assert torch.equal(out, expected)


def test_nested_experts() -> None:
    pair = [{"op": "concat", "of": [f"g{e}", f"u{e}"], "dim": 0} for e in range(3)]
    recipe = {"op": "cast", "to": "bfloat16", "of": {"op": "stack", "of": pair, "dim": 0}}
    tensors = {f"{part}{e}": torch.randn(4, 5) for part in "gu" for e in range(3)}
    out = execute(recipe, DictSource(tensors))
    expected = torch.stack([torch.cat([tensors[f"g{e}"], tensors[f"u{e}"]]) for e in range(3)]).to(torch.bfloat16)
    assert same_bits(out, expected)
    assert expected_inputs(recipe) == ["g0", "u0", "g1", "u1", "g2", "u2"]


def test_cast_of_a_cast_rounds_twice() -> None:
    """1 + 2**-8 + 2**-20 rounds up in bfloat16 directly, but down after float16."""
    value = torch.tensor([1 + 2.0**-8 + 2.0**-20])
    inner = {"op": "cast", "to": "float16", "of": "v"}
    for middle in (inner, {"op": "stack", "of": [inner], "dim": 0}):
        out = execute({"op": "cast", "to": "bfloat16", "of": middle}, DictSource({"v": value}))
        assert out.item() == value.to(torch.float16).to(torch.bfloat16).item() != value.to(torch.bfloat16).item()


def test_copy_is_not_copied_and_the_rest_leaves_the_source_alone() -> None:
    assert execute(copy("a"), SOURCE).data_ptr() == A.data_ptr()
    assert execute({"op": "stack", "of": ["a"], "dim": 0}, SOURCE).data_ptr() != A.data_ptr()


@pytest.mark.parametrize(
    "recipe",
    [
        {"op": "cast", "to": "float32", "of": "i"},
        {"op": "stack", "of": ["a", "c"], "dim": 0},
        {"op": "stack", "of": ["a", "i"], "dim": 0},
        {"op": "stack", "of": ["a"], "dim": 3},
        {"op": "concat", "of": ["a", "c"], "dim": 0},
        {"op": "concat", "of": ["a", "i"], "dim": 0},
        {"op": "concat", "of": ["a"], "dim": 2},
        {"op": "transpose", "of": "a", "dims": [0, 2]},
    ],
)
def test_what_does_not_fit_is_refused(recipe: dict) -> None:
    with pytest.raises(WeightMismatch):
        execute(recipe, SOURCE)


def test_missing_and_conflicting() -> None:
    with pytest.raises(MissingWeight, match="'z'"):
        execute(copy("z"), SOURCE)
    with pytest.raises(MissingWeight, match="'z'"):
        execute({"op": "tied", "of": ["z", "y"]}, SOURCE)
    for other in ("b", "c", "i"):
        with pytest.raises(TiedWeightConflict, match=f"a and {other}"):
            execute({"op": "tied", "of": ["a", other]}, SOURCE)
    nan = DictSource({"x": torch.tensor([float("nan"), 0.0]), "y": torch.tensor([float("nan"), -0.0])})
    assert execute({"op": "tied", "of": ["x", "x"]}, nan).isnan()[0]
    with pytest.raises(TiedWeightConflict):
        execute({"op": "tied", "of": ["x", "y"]}, nan)


@pytest.mark.parametrize(
    "recipe",
    [
        None,
        "a",
        {},
        {"op": []},
        {"op": "eval", "of": "a"},
        {"op": "copy"},
        {"op": "copy", "of": "a", "x": 1},
        {"op": "copy", "of": copy("a")},
        {"op": "copy", "of": ["a"]},
        {"op": "cast", "to": "int8", "of": "a"},
        {"op": "cast", "to": [], "of": "a"},
        {"op": "cast", "to": "float32", "of": ["a"]},
        {"op": "transpose", "of": 3, "dims": [0, 1]},
        {"op": "transpose", "of": "a", "dims": [0, -1]},
        {"op": "transpose", "of": "a", "dims": 1},
        {"op": "stack", "of": [], "dim": 0},
        {"op": "stack", "of": "a", "dim": 0},
        {"op": "stack", "of": [1], "dim": 0},
        {"op": "concat", "of": ["a"], "dim": True},
        {"op": "tied", "of": {}},
        {"op": "mxfp4", "blocks": {}, "scales": "s"},
        {"op": "mxfp4", "blocks": "b", "scales": ["s"]},
        {**fp8(), "block": [0, 128]},
        {**fp8(), "block": [128]},
        {**fp8(), "layout": "diagonal"},
        {**fp8(), "layout": []},
        {**fp8(), "scale": None},
        {**fp8(), "of": {}},
    ],
)
def test_recipes_from_files_are_checked(recipe: Any) -> None:
    with pytest.raises(BundleCorrupt, match="'x'"):
        validate(recipe, "x")


def test_deep_recipes_are_refused() -> None:
    recipe: Any = "a"
    for _ in range(30):
        recipe = {"op": "cast", "to": "float32", "of": recipe}
    with pytest.raises(BundleCorrupt, match="deep"):
        validate(recipe, "x")
