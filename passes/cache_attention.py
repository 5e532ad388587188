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
from deepinfer_compile.ops import (
    ATTENTION,
    CACHED_ATTENTION,
    CACHED_LATENT_ATTENTION,
    LATENT_ATTENTION,
    SHARED_ATTENTION,
    WRITE_KV,
)
from deepinfer_compile.passbase import PassContext, register
from deepinfer_compile.program import CacheSpec, Program
from deepinfer_compile.prune import prune
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.shared_keys import Pair, Source, attentions, pairs_of, shared_sources
from deepinfer_compile.skeleton import add_outputs, item_of, outputs_of

A = torch.ops.aten


@dataclass(frozen=True)
class _Site:
    """One attention of a block, or one write of keys that others read: its cache input's name, kind, row shape and
    window; of a reader of shared keys, what it reads at each call of the block."""

    hole: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    window: int
    sources: dict[Node, Source] | None = None


@register
@dataclass(frozen=True)
class CacheAttention:
    """Replace attention over one sequence by attention over paged caches of many requests.

    Before: `o = attention(q[1,H,T,D], k, v, None, sinks, scale, window, softcap, True)`
    After:  `o = cached_attention(q[T,H,D], k, v, kv!, query_start, seq_len, block_table, slot, ...)`, and the skeleton
    has the batch metadata and one cache per attention and layer as inputs. Layers of one window share a cache group.
    Where a block attends to keys that an earlier block made: `s = write_kv(k, v, kv!, slot)` in that block and
    `o = shared_attention(q, kv, query_start, seq_len, block_table, s, ...)` in each that reads them, one cache for all.
    Refused, not skipped: attention with an explicit mask or without causality, which no cache can serve.
    """

    name: ClassVar[str] = "cache-attention"
    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.CACHED})
    breaks: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        windows = sorted({_window(n) for gm in program.blocks.values() for n in attentions(gm)})
        metas = _Metas(program, tuple(windows or [0]))
        shared = shared_sources(program)
        sites: dict[str, list[_Site]] = {}
        for name, gm in program.blocks.items():
            ctx.graph, ctx.layers = name, tuple(program.layers_of(name))
            sites[name] = [_rewrite(gm, n, i, metas, ctx, shared.get(n)) for i, n in enumerate(attentions(gm))]
        makers = {s.maker for held in shared.values() for s in held.values()}
        pairs = {str(m.target): pairs_of(m, shared) for m in program.calls() if m in makers}
        writers = {name: _write(program, name, found, metas) for name, found in pairs.items()}
        caches = _pass_on(program, sites, writers, metas)
        if writers:
            prune(program)
        return replace(program, caches=tuple(caches), windows=metas.windows)


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


def _rewrite(
    gm: GraphModule, node: Node, index: int, metas: _Metas, ctx: PassContext, sources: dict[Node, Source] | None
) -> _Site:
    site = replace(_site(node, f"cache{index}"), sources=sources)
    words = "keys of an earlier block" if sources else f"{site.kind} cache"
    ctx.claim(node, f"{words}, window {site.window or 'none'}")
    names = metas.names(site.window)
    meta = [_hole(gm, m, metas.values[m]) for m in (names[:-1] if sources else names)]
    cache = _hole(gm, site.hole, metas.cache(site))
    edit = Editor(gm.graph, node)
    if sources:
        meta.append(_hole(gm, _slots(site), metas.values[names[-1]]))
        scale, softcap, sinks = (argument(node, name) for name in ("scale", "softcap", "sinks"))
        width = int(tensor(node).shape[-1])
        q = _rows(edit, node.args[0])
        out = edit.call(SHARED_ATTENTION.overload, q, cache, *meta, scale, site.window, softcap, sinks, width)
    elif site.kind == "kv":
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
    return _Site(hole, "kv", _shape(k, v), k.dtype, _window(node))


def _shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Of one page of keys and values [1, Hkv, T, D] and [1, Hkv, T, Dv]."""
    return (2, PAGE_SIZE, int(k.shape[1]), max(int(k.shape[3]), int(v.shape[3])))


def _slots(site: _Site) -> str:
    """The block's input for the slots that hold the keys that a site reads."""
    return f"written_{site.hole}"


@dataclass(frozen=True)
class _Writer:
    """What a block writes for others: the pairs, the cache input of each, and the place of the first slots among the
    block's results."""

    pairs: list[Pair]
    sites: list[_Site]
    first: int

    def place(self, pair: Pair) -> int:
        """Where the slots of a pair are among the block's results."""
        return self.first + self.pairs.index(pair)


def _write(program: Program, block: str, pairs: list[Pair], metas: _Metas) -> _Writer:
    """Let a block write keys and values that it gives, and give the slots that it wrote."""
    gm = program.blocks[block]
    sites, slots = [], []
    for i, pair in enumerate(pairs):
        made = outputs_of(gm)
        k, v = tensor(made[pair.keys]), tensor(made[pair.values])
        site = _Site(f"shared{i}", "kv", _shape(k, v), k.dtype, pair.window)
        slot = _hole(gm, metas.names(pair.window)[-1], metas.values[metas.names(pair.window)[-1]])
        cache = _hole(gm, site.hole, metas.cache(site))
        edit = Editor(gm.graph, gm.graph.output_node())
        rows = [_rows(edit, made[p]) for p in (pair.keys, pair.values)]
        slots.append(edit.call(WRITE_KV.overload, *rows, cache, slot))
        sites.append(site)
    return _Writer(pairs, sites, add_outputs(program, block, slots))


def _pass_on(
    program: Program, sites: dict[str, list[_Site]], writers: dict[str, _Writer], metas: _Metas
) -> list[CacheSpec]:
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
    stems, names = program.cache_stems(), _shared_names(program, sites)
    for order, call in enumerate(program.calls()):
        layer = call.meta["layer"] if call.meta["layer"] is not None else order
        extra = {m: inputs[m] for m in metas.values}
        writer = writers.get(str(call.target))
        own = [(f"cache_{stems[call]}_{i}", s) for i, s in enumerate(sites[str(call.target)]) if s.sources is None]
        own += [(names[call, p], s) for p, s in zip(writer.pairs, writer.sites)] if writer else []
        for cache, site in own:
            extra[site.hole] = hole(cache, metas.cache(site))
            group = metas.windows.index(site.window)
            caches.append(CacheSpec(cache, site.kind, group, layer, site.shape, site.dtype))
        for site, sources in ((s, s.sources) for s in sites[str(call.target)] if s.sources is not None):
            source = sources[call]
            extra[site.hole] = inputs[names[source.maker, source.pair]]
            extra[_slots(site)] = item_of(source.maker, writers[str(source.maker.target)].place(source.pair))
        holes = [n.name for n in program.blocks[str(call.target)].graph.nodes if n.op == "placeholder"]
        call.args = (*call.args, *(extra[h] for h in holes[len(call.args) :]))
    return caches


def _shared_names(program: Program, sites: dict[str, list[_Site]]) -> dict[tuple[Node, Pair], str]:
    """What a shared cache is called: as that of its first reader would be if each had its own."""
    names: dict[tuple[Node, Pair], str] = {}
    for call, stem in program.cache_stems().items():
        for i, site in enumerate(sites[str(call.target)]):
            if site.sources is not None:
                source = site.sources[call]
                names.setdefault((source.maker, source.pair), f"cache_{stem}_{i}")
    return names
