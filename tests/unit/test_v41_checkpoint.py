"""DeepSeek-V4.1's published tensors: their counts and bytes, and the way into the model and back.

Counts and bytes of the release are those of its file headers. Packed tensors are decoded again here, value by value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deepinfer_compile.bundle.safetensors_io import plan_layout
from deepinfer_compile.errors import (
    CompileError,
    MissingWeight,
    SurplusWeight,
    UnsupportedWeightFormat,
    WeightMismatch,
)
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.models.deepseek_v41.checkpoint import (
    Stored,
    load_published,
    parts,
    published_names,
    published_tensors,
)
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from deepinfer_compile.models.deepseek_v41.sizes import sizes

RELEASED = DeepseekV41Config()
ALL_TENSORS, IMAGE_TENSORS = 96_085, 266
ALL_BYTES, IMAGE_BYTES = 510_286_023_000, 970_536_960
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPERT = "layers.3.ffn.experts.2.w2.weight"


@pytest.fixture(scope="module", autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def released() -> dict[str, Stored]:
    return published_names(RELEASED)


def tensors(model: DeepseekV41) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in published_tensors(model)}


def empty(model: DeepseekV41) -> DeepseekV41:
    """A model of the same config whose every parameter is NaN."""
    other = DeepseekV41(model.config, model.token_map).to(model.embed.weight.dtype).eval()
    for p in other.parameters():
        p.fill_(math.nan)
    return other


def logits(model: DeepseekV41) -> Tensor:
    out: Tensor = model(torch.randint(0, 307, (3, 41), generator=torch.Generator().manual_seed(0)))
    return out


def test_every_tensor_of_the_release_has_a_place(released: dict[str, Stored]) -> None:
    assert len(released) == ALL_TENSORS - IMAGE_TENSORS
    assert sum(stored.nbytes for stored in released.values()) == ALL_BYTES - IMAGE_BYTES
    layers = {0: 2334, 1: 2340, 2: 2342, 3: 2334, 8: 2342, 14: 2348, 20: 2341, 24: 2337, 39: 2334}
    for layer, count in layers.items():
        assert sum(name.startswith(f"layers.{layer}.") for name in released) == count
    assert [sum(name.startswith(f"mtp.{i}.") for name in released) for i in range(3)] == [801, 798, 802]


def test_bytes_of_the_release_by_kind(released: dict[str, Stored]) -> None:
    def total(*marks: str) -> int:
        return sum(stored.nbytes for name, stored in released.items() if all(mark in name for mark in marks))

    assert total("layers.", ".ffn.experts.") == 288_777_830_400
    assert total("mtp.", ".ffn.experts.") == 7_219_445_760
    assert total("mtp.") == 7_932_874_632
    assert total(".engram.embed.") == 202_758_032_400
    assert total(".engram.") == 203_073_076_240
    assert total("layers.", ".ffn.gate.") == 157_409_280


def test_shapes_and_formats_of_the_release(released: dict[str, Stored]) -> None:
    assert released["layers.3.ffn.experts.0.w1.weight"] == ("int8", (2304, 2560))
    assert released["layers.3.ffn.experts.383.w2.scale"] == ("float8_e8m0fnu", (5120, 72))
    assert released["layers.3.attn.wq_b.weight"] == ("float8_e4m3fn", (32768, 1280))
    assert released["layers.3.attn.wo_a.scale"] == ("float8_e8m0fnu", (256, 128))
    assert released["layers.14.engram.embed.scale"] == ("float8_e8m0fnu", (384016682, 8))
    assert released["layers.1.engram.wkv.scale"] == ("float8_e8m0fnu", (800, 192))
    assert released["layers.2.attn.indexer.wq_b.scale"] == ("float8_e8m0fnu", (128, 40))
    assert released["layers.2.attn.compressor.wgate.weight"] == ("bfloat16", (512, 5120))
    assert released["layers.3.hc_attn_fn"] == ("float32", (24, 20480))
    assert released["mtp.2.ffn.gate.bias_vl"] == ("float32", (128,))
    assert released["mtp.0.main_proj.scale"] == ("float8_e8m0fnu", (160, 480))
    assert released["mtp.2.confidence_head.proj.weight"] == ("bfloat16", (1, 5376))
    assert released["mtp.2.markov_head.head.weight"] == ("bfloat16", (129280, 256))


def test_the_parts_are_all_parameters_once() -> None:
    found, counted = parts(RELEASED), sizes(RELEASED)
    assert len({part.name for part in found}) == len(found)
    everything = counted.backbone + counted.engram + counted.draft
    assert sum(math.prod(part.shape) for part in found) == everything
    model = tiny.make()
    for p in model.parameters():
        p.zero_()
    for part in parts(model.config):
        part.of(dict(model.named_parameters())[part.parameter]).add_(1)
    assert all(bool((p == 1).all()) for p in model.parameters())


@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_a_folder_written_and_read_is_the_same_model(tmp_path: Path, drafts: int) -> None:
    targets = (7, 8, 9) if drafts else ()
    model = tiny.make(num_nextn_predict_layers=drafts, dspark_target_layer_ids=targets)
    save_file(tensors(model), tmp_path / "model.safetensors")
    other = empty(model)
    load_published(other, tmp_path)
    assert torch.equal(logits(other), logits(model))
    for (name, got), want in zip(other.named_parameters(), model.parameters()):
        assert torch.equal(got, want), name
    load_published(empty(model), tensors(model))


def test_experts_lie_where_the_names_say() -> None:
    model, other = tiny.make(), empty(tiny.make())
    given = tensors(model)
    load_published(other, given)
    stack = other.blocks[3].ffn.experts
    assert torch.equal(stack.w13[2, :20], given["layers.3.ffn.experts.2.w1.weight"])
    assert torch.equal(stack.w13[2, 20:], given["layers.3.ffn.experts.2.w3.weight"])
    assert torch.equal(stack.w2[2], given[EXPERT])
    assert other.mtp is not None
    assert torch.equal(other.mtp.markov_head.weight, given["mtp.1.markov_head.head.weight"])
    assert torch.equal(other.mtp.context_proj.weight, given["mtp.0.main_proj.weight"])
    assert torch.equal(other.mtp.blocks[1].attn.wq_a.weight, given["mtp.1.attn.wq_a.weight"])


def test_what_images_use_is_left() -> None:
    model = tiny.make()
    images = {"vision.blocks.0.norm.weight", "aligner.w1.weight", "image_start", "mtp.0.ffn.gate.bias_vl"}
    load_published(empty(model), {**tensors(model), **dict.fromkeys(images, torch.zeros(3))})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({EXPERT: None}, MissingWeight, EXPERT),
        ({"mtp.1.norm.weight": None}, MissingWeight, r"mtp\.1\.norm\.weight"),
        ({"layers.3.ffn.experts.7.w1.weight": (20, 48)}, SurplusWeight, r"experts\.7\.w1"),  # there are experts 0 to 6
        ({"layers.3.attn.indexer.wq_b.weight": (36, 28)}, SurplusWeight, r"layers\.3\.attn\.indexer"),
        ({"layers.3.attn.wq_a.scale": (1, 2)}, SurplusWeight, r"wq_a\.scale"),  # of a matrix that is not packed
        ({EXPERT: (48, 21)}, WeightMismatch, r"\[48, 20\].*\[48, 21\]"),
        ({"head.weight": (307,)}, WeightMismatch, r"head\.weight"),
    ],
)
def test_another_models_tensors_are_refused(
    tmp_path: Path, change: dict[str, tuple[int, ...] | None], error: type[CompileError], words: str
) -> None:
    model = tiny.make()
    given = tensors(model)
    for name, shape in change.items():
        given.pop(name, None)
        if shape is not None:
            given[name] = torch.zeros(shape)
    save_file(given, tmp_path / "model.safetensors")
    other = empty(model)
    with pytest.raises(error, match=words) as raised:
        load_published(other, tmp_path)
    assert str(tmp_path) in str(raised.value)
    with pytest.raises(error, match=words):
        load_published(other, given)
    assert all(bool(p.isnan().all()) for p in other.parameters())  # nothing was written


def test_a_model_without_memory_is_refused() -> None:
    model = tiny.make()
    given = tensors(model)
    with pytest.raises(WeightMismatch, match=r"meta device"):
        load_published(model.to("meta"), given)


# -- packed tensors ---------------------------------------------------------------------------------------------------


def packed(model: DeepseekV41) -> dict[str, Tensor]:
    """Random tensors in the release's formats for every name; scales between 1/8 and 1."""
    torch.manual_seed(0)
    given = {}
    for name, (dtype, shape) in published_names(model.config).items():
        if dtype == "int8":
            given[name] = torch.randint(-128, 128, shape, dtype=torch.int8)
        elif dtype == "float8_e8m0fnu":
            given[name] = torch.randint(124, 128, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        else:
            given[name] = (torch.randn(shape) / 4).to(getattr(torch, dtype))
    return given


def decoded(given: dict[str, Tensor], name: str) -> Tensor:
    """One tensor in fp32: its numbers times their scales, one by one."""
    numbers = given[name]
    scale = given.get(name.removesuffix(".weight") + ".scale")
    if scale is None:
        return numbers.float()
    rows = []
    exponents = scale.view(torch.uint8).tolist()
    for i, line in enumerate(numbers.view(torch.uint8).tolist() if numbers.dtype == torch.int8 else numbers.tolist()):
        if numbers.dtype == torch.int8:
            halves = [half for byte in line for half in (byte & 15, byte >> 4)]
            values = [(-1 if half >= 8 else 1) * E2M1[half % 8] for half in halves]
            factors = exponents[i]
        else:
            values, factors = line, exponents[i if "embed" in name else i // 32]
        rows.append([value * 2.0 ** (factors[k // 32] - 127) for k, value in enumerate(values)])
    return torch.tensor(rows)


@pytest.fixture(scope="module")
def wide_model() -> DeepseekV41:
    """A tiny model whose expert rows are whole groups of 32; other widths are not, so that some blocks are cut."""
    return tiny.make(hidden_size=64, moe_intermediate_size=32, num_nextn_predict_layers=1, engram_head_dim=40)


def test_packed_tensors_are_their_numbers_times_their_scales(wide_model: DeepseekV41, tmp_path: Path) -> None:
    given = packed(wide_model)
    other = empty(wide_model)
    load_published(other, given)
    parameters = dict(other.named_parameters())
    for part in parts(wide_model.config):
        assert torch.equal(part.of(parameters[part.parameter]), decoded(given, part.name)), part.name
    bits = {n: t.view(torch.uint8) if t.dtype == torch.float8_e8m0fnu else t for n, t in given.items()}
    save_file(bits, tmp_path / "model.safetensors")
    low = empty(wide_model).to(torch.bfloat16)
    load_published(low, tmp_path)
    for (name, got), want in zip(low.named_parameters(), other.parameters()):
        assert torch.equal(got, want.bfloat16()), name
    assert bool(logits(other).isfinite().all())


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("layers.2.attn.wq_a.scale", None, MissingWeight, r"layers\.2\.attn\.wq_a\.scale"),
        ("layers.2.attn.wq_a.scale", torch.zeros(1, 2), UnsupportedWeightFormat, r"wq_a\.scale.*e8m0"),
        ("layers.2.attn.wq_a.scale", torch.zeros(2, 2, dtype=torch.uint8), WeightMismatch, r"wq_a\.scale"),
        ("layers.2.attn.wq_a.weight", torch.zeros(28, 64).to(torch.float8_e5m2), UnsupportedWeightFormat, "e4m3"),
        ("layers.2.attn.wq_a.weight", torch.zeros(28, 32, dtype=torch.int8), UnsupportedWeightFormat, r"wq_a"),
        ("norm.weight", torch.zeros(64).to(torch.float8_e4m3fn), UnsupportedWeightFormat, r"norm\.weight.*bfloat16"),
        (EXPERT, torch.zeros(64, 32).to(torch.float8_e4m3fn), UnsupportedWeightFormat, r"experts\.2\.w2.*int8"),
        ("layers.3.ffn.experts.2.w2.scale", torch.zeros(64, 2, dtype=torch.uint8), WeightMismatch, r"w2\.scale"),
    ],
)
def test_other_formats_are_refused_by_name(
    wide_model: DeepseekV41, name: str, change: Tensor | None, error: type[CompileError], words: str
) -> None:
    given = packed(wide_model)
    del given[name]
    if change is not None:
        given[name] = change
    with pytest.raises(error, match=words):
        load_published(empty(wide_model), given)


def test_packed_rows_that_are_no_whole_groups_are_refused() -> None:
    model = tiny.make()
    with pytest.raises(UnsupportedWeightFormat, match="experts"):
        load_published(empty(model), packed(model))


def test_a_dtype_that_torch_lacks_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny.make()
    given = {name: tensor.contiguous() for name, tensor in published_tensors(model)}
    listed = [(name, "F4" if name == EXPERT else "F32", tuple(tensor.shape)) for name, tensor in given.items()]
    layout = plan_layout(listed, {})
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(layout.head)
        for (name, dtype, _), pad in zip(listed, layout.pads):
            data = given[name].numpy().tobytes()
            file.write((data[: len(data) // 8] if dtype == "F4" else data) + bytes(pad))
    with pytest.raises(UnsupportedWeightFormat, match=r"F4.*experts\.2\.w2"):
        load_published(empty(model), tmp_path)
