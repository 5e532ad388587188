"""The published checkpoint's tensors and this model's parameters, from either side.

A parameter is made of parts: one published tensor each, which is the whole parameter or, of a stack of experts, some
rows of one entry. Reading writes every tensor straight into its part and writing takes the part out, so the two
directions are one map, and nothing larger than a tensor of the file is held beside the model.

Published matrices are packed by role, and only where the release packs them is a packed tensor read: routed experts as
two e2m1 values a byte, low half first, with an e8m0 scale for 32 values of a row; the large linears as e4m3 with an
e8m0 scale for 32 x 32 values; memory tables as e4m3 with an e8m0 scale for 32 values of a row. Any tensor may come as
plain floating numbers instead. What only images use (their tower, their routing biases) is known by name and left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_compile.bundle.checkpoint import Checkpoint, DictSource
from deepinfer_compile.bundle.dequant import MX_GROUP, fp8_block_into, grid_shape, mxfp4_into
from deepinfer_compile.bundle.mapped import Spec, describe_spec, dtype_name, torch_dtype
from deepinfer_compile.bundle.recipes import FLOATS
from deepinfer_compile.bundle.safetensors_io import FILE_DTYPES
from deepinfer_compile.errors import MissingWeight, SurplusWeight, UnsupportedWeightFormat, WeightMismatch
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.engram import plain_map
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41

DRAFT_NAMES = {
    "context_proj": "mtp.0.main_proj",
    "context_norm": "mtp.0.main_norm",
    "norm": "mtp.{last}.norm",
    "markov_embed": "mtp.{last}.markov_head.embed",
    "markov_head": "mtp.{last}.markov_head.head",
    "confidence": "mtp.{last}.confidence_head.proj",
}
"""Where the drafter's own tensors lie in the file: with the first or the last draft layer."""
SQUARE = (
    *(f".attn.{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")),
    *(f".shared_experts.{name}.weight" for name in ("w1", "w2", "w3")),
    ".engram.wkv.weight",
    ".main_proj.weight",
)
"""Endings of the names of matrices published as e4m3 in blocks of 32 x 32."""
TABLE = ".engram.embed.weight"
WIDE = ("_fn", "_base", "_scale", ".attn_sink", ".gate.bias")
"""Endings of the names of tensors published in fp32; all others are bf16."""
IMAGES = ("vision.", "aligner.", "image_")
IMAGE_BIAS = ".ffn.gate.bias_vl"
"""What only images use: beginnings of names, and the ending of the routers' second bias."""
E8M0 = (torch.float8_e8m0fnu, torch.uint8)
PACKED = (torch.int8, torch.uint8)

Source = Checkpoint | DictSource


class Stored(NamedTuple):
    """How the release stores a tensor: torch dtype name and shape. Packed e2m1 is int8 of half the width."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


class Part(NamedTuple):
    """The published tensor `name`, of `shape`, and its place: rows from `start` of entry `expert` of `parameter`.

    The whole parameter where `expert` is None.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    expert: int | None = None
    start: int = 0

    @property
    def scale(self) -> str:
        """The name of its scales where it is packed."""
        return self.name.removesuffix(".weight") + ".scale"

    @property
    def block(self) -> tuple[int, int] | None:
        """Values that share an e4m3 scale, where the release uses that format."""
        if self.name.endswith(TABLE):
            return 1, MX_GROUP
        return (MX_GROUP, MX_GROUP) if self.name.endswith(SQUARE) else None

    def of(self, parameter: Tensor) -> Tensor:
        """The view of its parameter that it fills."""
        if self.expert is None:
            return parameter
        return parameter[self.expert, self.start : self.start + self.shape[0]]


def parts(config: DeepseekV41Config) -> list[Part]:
    """Every published tensor that has a place in the model of a configuration; allocates nothing."""
    with torch.device("meta"):
        return _parts(DeepseekV41(config, plain_map(config)))


def published_names(config: DeepseekV41Config) -> dict[str, Stored]:
    """Every tensor of the published text model, scales and image biases included, by name."""
    found: dict[str, Stored] = {}
    for part in parts(config):
        found |= _stored(part)
        if part.name.endswith(".ffn.gate.bias"):
            found[f"{part.name}_vl"] = Stored("float32", part.shape)
    return found


def published_tensors(model: DeepseekV41) -> Iterator[tuple[str, Tensor]]:
    """The model under published names, one tensor at a time, as plain numbers: views, not copies."""
    parameters = dict(model.named_parameters())
    for part in _parts(model):
        yield part.name, part.of(parameters[part.parameter]).detach()


def load_published(model: DeepseekV41, source: Path | str | Mapping[str, Tensor]) -> None:
    """Fill the model's parameters, on whatever device and in their own dtype, from a model folder or named tensors.

    Files are mapped and read tensor by tensor. Everything that headers show is checked before the first write. Raises
    MissingWeight, SurplusWeight, WeightMismatch, UnsupportedWeightFormat, each naming tensor and file, and what
    `Checkpoint.open` raises.
    """
    found = DictSource(source) if isinstance(source, Mapping) else Checkpoint.open(source)
    parameters, wanted = dict(model.named_parameters()), _parts(model)
    used: set[str] = set()
    for part in wanted:
        if parameters[part.parameter].is_meta:
            expected = "a parameter that can be written"
            raise WeightMismatch(tensor=part.parameter, expected=expected, found="one on the meta device")
        used |= _checked(part, found)
    for name in sorted(found.names() - used):
        if not name.startswith(IMAGES) and not name.endswith(IMAGE_BIAS):
            raise SurplusWeight(tensor=name, file=_file(found, name))
    with torch.no_grad():
        for part in wanted:
            _read(part, found, part.of(parameters[part.parameter]))


def _parts(model: DeepseekV41) -> list[Part]:
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return [part for name, shape in shapes.items() for part in _parts_of(model.config, name, shape)]


def _parts_of(config: DeepseekV41Config, parameter: str, shape: tuple[int, ...]) -> Iterator[Part]:
    layer, stacked, stack = parameter.partition(".experts.")
    if not stacked:
        yield Part(_published(config, parameter), parameter, shape)
        return
    names = ("w1", "w3") if stack == "w13" else ("w2",)
    rows = shape[1] // len(names)
    for expert in range(shape[0]):
        for i, name in enumerate(names):
            whole = f"{_published(config, layer)}.experts.{expert}.{name}.weight"
            yield Part(whole, parameter, (rows, shape[2]), expert, i * rows)


def _published(config: DeepseekV41Config, name: str) -> str:
    """The published name of a parameter that is no stack, or of the module that holds one."""
    if name.startswith("mtp.layers."):
        return "mtp." + name.removeprefix("mtp.layers.")
    if not name.startswith("mtp."):
        return name
    own, _, end = name.removeprefix("mtp.").partition(".")
    return DRAFT_NAMES[own].format(last=config.num_nextn_predict_layers - 1) + "." + end


def _stored(part: Part) -> dict[str, Stored]:
    if part.expert is not None:
        rows, width = part.shape
        packed = Stored("int8", (rows, width // 2))
        return {part.name: packed, part.scale: Stored("float8_e8m0fnu", (rows, -(-width // MX_GROUP)))}
    if part.block is not None:
        scales = Stored("float8_e8m0fnu", grid_shape(part.shape, part.block))
        return {part.name: Stored("float8_e4m3fn", part.shape), part.scale: scales}
    return {part.name: Stored("float32" if part.name.endswith(WIDE) else "bfloat16", part.shape)}


def _checked(part: Part, found: Source) -> set[str]:
    """The names that one part is read from, after a look at their headers."""
    dtype, shape = _spec(part.name, found)
    if dtype in FLOATS:
        _match(part.name, (dtype, part.shape), (dtype, shape), found)
        return {part.name}
    if part.block is not None:
        known = dtype == torch.float8_e4m3fn
    else:
        known = part.expert is not None and dtype in PACKED and part.shape[1] % MX_GROUP == 0
    if not known:
        reason = f"tensor {part.name!r} is published as {_stored(part)[part.name].dtype}"
        raise UnsupportedWeightFormat(format=dtype_name(dtype), reason=reason, where=_file(found, part.name))
    scale = _spec(part.scale, found)
    if scale[0] not in E8M0:
        reason = f"scales {part.scale!r} are published as float8_e8m0fnu"
        raise UnsupportedWeightFormat(format=dtype_name(scale[0]), reason=reason, where=_file(found, part.scale))
    wanted = _stored(part)
    _match(part.name, (dtype, wanted[part.name].shape), (dtype, shape), found)
    _match(part.scale, (scale[0], wanted[part.scale].shape), scale, found)
    return {part.name, part.scale}


def _read(part: Part, found: Source, out: Tensor) -> None:
    numbers = found.tensor(part.name)
    if numbers.dtype in FLOATS:
        out.copy_(numbers)
    elif part.block is not None:
        fp8_block_into(out, numbers, found.tensor(part.scale), part.block, "row", part.name)
    else:
        mxfp4_into(out, numbers, found.tensor(part.scale), part.name)


def _spec(name: str, found: Source) -> Spec:
    if name not in found:
        raise MissingWeight(tensor=name, where=_file(found, name))
    if isinstance(found, Checkpoint) and found.entry(name).dtype not in FILE_DTYPES:
        reason = f"tensor {name!r} has no form of its own in torch"
        raise UnsupportedWeightFormat(format=found.entry(name).dtype, reason=reason, where=_file(found, name))
    return found.spec(name)


def _match(name: str, expected: Spec, spec: Spec, found: Source) -> None:
    if spec != expected:
        where = _file(found, name)
        raise WeightMismatch(tensor=name, expected=describe_spec(expected), found=describe_spec(spec), where=where)


def _file(found: Source, name: str) -> str:
    """Where a tensor is, or, of one that is missing, where it was looked for."""
    if isinstance(found, DictSource):
        return "the tensors given"
    return str(found.folder / found.file_of(name)) if name in found else str(found.folder)
