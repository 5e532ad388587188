"""Give attention its paged caches: the step from one uncached sequence to packed requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from deepinfer_compile.errors import UnsupportedConstruct
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, fake_mode_of, is_op, place_of, tensor
from deepinfer_compile.ops import ATTENTION, CACHED_ATTENTION, CACHED_LATENT_ATTENTION, LATENT_ATTENTION
from deepinfer_compile.passbase import PassContext, register
from deepinfer_compile.program import CacheSpec, Program
from deepinfer_compile.runtime.batch import PAGE_SIZE

A = torch.ops.aten


@dataclass(frozen=True)
class _Site:
    """One attention of a block: its cache input's name, kind, row shape and window."""

    hole: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    window: int


@register
@dataclass(frozen=True)
class CacheAttention:
    """Replace attention over one sequence by attention over paged caches of many requests.

    Before: `o = attention(q[1,H,T,D], k, v, None, sinks, scale, window, softcap, True)`
    After:  `o = cached_attention(q[T,H,D], k, v, kv!, query_start, seq_len, block_table, slot, ...)`, and the skeleton
    has the batch metadata and one cache per attention and layer as inputs. Layers of one window share a cache group.
    Refused, not skipped: attention with an explicit mask or without causality, which no cache can serve.
    """

    name: ClassVar[str] = "cache-attention"
    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.CACHED})
    breaks: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        windows = sorted({_window(n) for gm in program.blocks.values() for n in _attentions(gm)})
        metas = _Metas(program, tuple(windows or [0]))
        sites: dict[str, list[_Site]] = {}
        for name, gm in program.blocks.items():
            ctx.graph, ctx.layers = name, tuple(program.layers_of(name))
            sites[name] = [_rewrite(gm, n, i, metas, ctx) for i, n in enumerate(_attentions(gm))]
        caches = _pass_on(program, sites, metas)
        return replace(program, caches=tuple(caches), windows=metas.windows)


def _attentions(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if is_op(n, ATTENTION.overload, LATENT_ATTENTION.overload)]


def _window(node: Node) -> int:
    return int(argument(node, "window")) if is_op(node, ATTENTION.overload) else 0


class _Metas:
    """Batch metadata inputs: fake values with their own symbolic sizes, one set a program."""

    def __init__(self, program: Program, windows: tuple[int, ...]) -> None:
        self.windows = windows
        self.mode = fake_mode_of(program.skeleton.graph)
        tokens = tensor(next(n for n in program.inputs() if n.name == "input_ids"))
        self.values: dict[str, Tensor] = {
            "query_start": self.fake("query_start", (5,), torch.int32),
            "seq_len": self.fake("seq_len", (4,), torch.int32),
        }
        for g in range(len(windows)):
            self.values[f"block_table_{g}"] = self.fake(f"block_table_{g}", (4, 7), torch.int32, (0, 1))
            with self.mode:
                self.values[f"slot_{g}"] = torch.empty(tokens.shape[1], dtype=torch.int64)
        self.pages = self.fake("pages", (9,), torch.int32).shape[0]

    def fake(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, dynamic: tuple[int, ...] = (0,)) -> Tensor:
        """A fake tensor whose `dynamic` dims are fresh symbols."""
        sizes = [DimDynamic.DYNAMIC if i in dynamic else DimDynamic.STATIC for i in range(len(shape))]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        real = torch.empty(shape, dtype=dtype)
        return self.mode.from_tensor(real, symbolic_context=context, source=ConstantSource(f"meta_{name}"))

    def cache(self, site: _Site) -> Tensor:
        """The fake value of a cache."""
        with self.mode:
            return torch.empty((self.pages, *site.shape), dtype=site.dtype)

    def names(self, window: int) -> tuple[str, str, str, str]:
        """Metadata that attention of this window reads."""
        g = self.windows.index(window)
        return "query_start", "seq_len", f"block_table_{g}", f"slot_{g}"


def _hole(gm: GraphModule, name: str, val: Tensor) -> Node:
    """The block's placeholder of that name, made after the last one if it is not there."""
    node: Node
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.name == name:
            return node
    anchor = next(n for n in gm.graph.nodes if n.op != "placeholder")
    with gm.graph.inserting_before(anchor):
        node = gm.graph.placeholder(name)
    node.meta = {"val": val}
    return node


def _rewrite(gm: GraphModule, node: Node, index: int, metas: _Metas, ctx: PassContext) -> _Site:
    site = _site(node, f"cache{index}")
    ctx.claim(node, f"{site.kind} cache, window {site.window or 'none'}")
    meta = [_hole(gm, m, metas.values[m]) for m in metas.names(site.window)]
    cache = _hole(gm, site.hole, metas.cache(site))
    edit = Editor(gm.graph, node)
    if site.kind == "kv":
        q, k, v = (_rows(edit, n) for n in node.args[:3])
        scale, softcap = argument(node, "scale"), argument(node, "softcap")
        out = edit.call(
            CACHED_ATTENTION.overload, q, k, v, cache, *meta, scale, site.window, softcap, argument(node, "sinks")
        )
    else:
        q_nope, q_rope = (_rows(edit, n) for n in node.args[:2])
        c, k_rope = (edit.call(A.select.int, n, 0, 0) for n in node.args[2:4])
        weights = node.args[4:6]
        out = edit.call(
            CACHED_LATENT_ATTENTION.overload,
            *(q_nope, q_rope, c, k_rope, *weights, cache, *meta, argument(node, "scale"), "expanded"),
        )
    edit.replace(node, edit.call(A.unsqueeze.default, out, 0))
    return site


def _rows(edit: Editor, node: Any) -> Node:
    """[1, H, T, D] -> [T, H, D]."""
    return edit.call(A.transpose.int, edit.call(A.select.int, node, 0, 0), 0, 1)


def _site(node: Node, hole: str) -> _Site:
    if is_op(node, LATENT_ATTENTION.overload):
        c, rope = tensor(node.args[2]), tensor(node.args[3])  # type: ignore[arg-type]
        return _Site(hole, "latent", (PAGE_SIZE, int(c.shape[2] + rope.shape[2])), c.dtype, 0)
    if argument(node, "mask") is not None or not argument(node, "causal"):
        raise UnsupportedConstruct(
            construct="attention with an explicit mask or without causality",
            fix="a decoder with caches needs causal attention; use the torch.compile backend for other models",
            where=place_of(node),
        )
    k, v = tensor(node.args[1]), tensor(node.args[2])  # type: ignore[arg-type]
    shape = (2, PAGE_SIZE, int(k.shape[1]), max(int(k.shape[3]), int(v.shape[3])))
    return _Site(hole, "kv", shape, k.dtype, _window(node))


def _pass_on(program: Program, sites: dict[str, list[_Site]], metas: _Metas) -> list[CacheSpec]:
    """Add the inputs to the skeleton and hand them to every block call."""
    graph, caches = program.skeleton.graph, []
    anchor = next(n for n in graph.nodes if n.op != "placeholder")
    inputs: dict[str, Node] = {}

    def hole(name: str, val: Tensor) -> Node:
        if name not in inputs:
            with graph.inserting_before(anchor):
                inputs[name] = graph.placeholder(name)
            inputs[name].meta = {"val": val}
        return inputs[name]

    for name, val in metas.values.items():
        hole(name, val)
    for order, call in enumerate(program.calls()):
        layer = call.meta["layer"] if call.meta["layer"] is not None else order
        extra: dict[str, Node] = {}
        for i, site in enumerate(sites[str(call.target)]):
            cache = f"cache_{layer}_{i}"
            extra[site.hole] = hole(cache, metas.cache(site))
            extra.update({m: inputs[m] for m in metas.names(site.window)})
            group = metas.windows.index(site.window)
            caches.append(CacheSpec(cache, site.kind, group, layer, site.shape, site.dtype))
        holes = [n.name for n in program.blocks[str(call.target)].graph.nodes if n.op == "placeholder"]
        call.args = (*call.args, *(extra[h] for h in holes[len(call.args) :]))
    return caches
