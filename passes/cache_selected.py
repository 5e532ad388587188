"""Give chosen rows, windows of latents and recent rows their paged caches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, fake_mode_of, is_op, tensor, value
from deepinfer_compile.match_packed import form_of, stored
from deepinfer_compile.match_selected import made_by
from deepinfer_compile.ops import (
    CACHED_RECENT,
    CACHED_SELECT_ROWS,
    CACHED_SELECTED_ATTENTION,
    RECENT,
    SELECT_ROWS,
    SELECTED_ATTENTION,
    WRITE_ROWS,
)
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.program import CacheSpec, Program
from deepinfer_compile.prune import prune
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.skeleton import add_outputs, block_input, fresh, item_of, program_input, tokens_of

A = torch.ops.aten
SITES = (RECENT.overload, SELECT_ROWS.overload, SELECTED_ATTENTION.overload)


@register
@dataclass(frozen=True)
class CacheSelected:
    """Replace recent rows, choices and attention over one sequence by those over paged caches of many requests.

    Before: `n, c = select_rows(q, w, keys[1,T,D], ...); o = selected_attention(q, latents, rows, n, ...)`
    After:  `s = write_rows(keys, cache!, slot, ratio); n, c = cached_select_rows(q, w, cache, s, ...)` and so for rows,
            `o = cached_selected_attention(q, latents, window!, ..., rows_cache, s, ...)`
    Rows and keys that other blocks read are written once, by the block that makes them. Caches of a window share a
    group with the narrowest window that holds them; a page of rows has as many as its tokens complete. What comes from
    `unpack_rows` is cached as the bytes that it reads.
    Left alone: programs without such calls.
    """

    name: ClassVar[str] = "cache-selected"
    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL, Fact.CACHED})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        if not any(_sites(gm.graph) for gm in program.blocks.values()):
            return program
        cacher = _Cacher(program)
        for name in dict.fromkeys(str(c.target) for c in program.calls()):
            ctx.graph, ctx.layers = name, tuple(program.layers_of(name))
            for node in _sites(program.blocks[name].graph):
                ctx.claim(node, cacher.rewrite(name, node))
        caches = cacher.finish()
        prune(program)
        return replace(program, caches=(*program.caches, *caches), windows=tuple(cacher.windows))


def _sites(graph: torch.fx.Graph) -> list[Node]:
    return [n for n in graph.nodes if is_op(n, *SITES)]


def _window(node: Node) -> int:
    return int(argument(node, "window" if is_op(node, SELECTED_ATTENTION.overload) else "count"))


@dataclass
class _Block:
    """own: holes for caches that a block writes, of what kind, group and shape. written: of rows that it makes, their
    cache and the slots that were written. read: of rows that it is given."""

    own: dict[Node, tuple[str, int]] = field(default_factory=dict)
    written: dict[Node, tuple[Node, Node]] = field(default_factory=dict)
    read: dict[Node, tuple[Node, Node]] = field(default_factory=dict)
    ratio: dict[Node, int] = field(default_factory=dict)


class _Cacher:
    """Rewrites blocks one by one, and then the skeleton."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.windows = list(program.windows)
        self.mode = fake_mode_of(program.skeleton.graph)
        self.pages = self._pages()
        self.blocks = {name: _Block() for name in program.blocks}
        self._add_windows([n for gm in program.blocks.values() for n in _sites(gm.graph)])

    def _pages(self) -> Any:
        """The number of pages that every cache has."""
        if not self.program.caches:
            return fresh(self.program, "pages", (9,), torch.int32, (0,)).shape[0]
        first = self.program.caches[0].name
        return tensor(next(n for n in self.program.skeleton.graph.nodes if n.name == first)).shape[0]

    def _add_windows(self, sites: list[Node]) -> None:
        """Groups that are missing: of every window, and of what no window is wide enough for."""
        for node in (n for n in sites if is_op(n, SELECTED_ATTENTION.overload)):
            self.windows += [] if _window(node) in self.windows else [_window(node)]
        for count in sorted({_window(n) for n in sites if is_op(n, RECENT.overload)}, reverse=True):
            self.windows += [] if any(w >= count for w in self.windows) else [count]
        if 0 not in self.windows and any(is_op(n, SELECT_ROWS.overload) for n in sites):
            self.windows.append(0)

    def group(self, width: int) -> int:
        """The group of the narrowest window that holds this many tokens, of the whole context for 0."""
        return self.windows.index(min((w for w in self.windows if w >= width > 0), default=0))

    def meta(self, block: str, name: str, group: int | None = None) -> Node:
        """The block's input for batch metadata, of a group for block tables and slots."""
        full = name if group is None else f"{name}_{group}"
        found = next((n for n in self.program.skeleton.graph.nodes if n.op == "placeholder" and n.name == full), None)
        if found is None:
            val = self._slots() if name == "slot" else fresh(self.program, full, (4, 7), torch.int32, (0, 1))
            found = program_input(self.program, full, val)
        return block_input(self.program, block, found)

    def _slots(self) -> Tensor:
        with self.mode:
            return torch.empty(tokens_of(self.program), dtype=torch.int64)  # type: ignore[arg-type]

    def cache(self, block: str, kind: str, group: int, shape: tuple[int, ...], dtype: torch.dtype) -> Node:
        """A new hole of a block for a cache that it writes."""
        own = self.blocks[block].own
        with self.mode:
            val = torch.empty((self.pages, *shape), dtype=dtype)
        hole = self.hole(block, f"{kind}_cache{len(own)}", val)
        own[hole] = (kind, group)
        return hole

    def hole(self, block: str, name: str, val: Tensor) -> Node:
        """A new input of a block, which no call feeds yet."""
        graph = self.program.blocks[block].graph
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            node: Node = graph.placeholder(name)
        node.meta = {"val": val}
        for call in (c for c in self.program.calls() if c.target == block):
            call.args = (*call.args, self.program.inputs()[0])  # until it is fed
        return node

    def rewrite(self, block: str, node: Node) -> str:
        """Rewrite one call; what was done."""
        if is_op(node, RECENT.overload):
            return self._recent(block, node)
        return self._select(block, node) if is_op(node, SELECT_ROWS.overload) else self._attend(block, node)

    def _batch(self, block: str, group: int) -> list[Node]:
        return [self.meta(block, n) for n in ("query_start", "seq_len")] + [self.meta(block, "block_table", group)]

    def _recent(self, block: str, node: Node) -> str:
        x, fill, count = (argument(node, n) for n in ("x", "fill", "count"))
        group = self.group(count)
        held = tensor(x)
        shape = (PAGE_SIZE, *(int(d) for d in held.shape[2:]))
        cache, meta = self.cache(block, "recent", group, shape, held.dtype), self._batch(block, group)
        slot = self.meta(block, "slot", group)
        edit = Editor(node.graph, node)
        out = edit.call(CACHED_RECENT.overload, edit.call(A.select.int, x, 0, 0), cache, *meta, slot, fill, count)
        edit.replace(node, edit.call(A.unsqueeze.default, out, 0))
        return f"the last {count} tokens, window {self.windows[group]}"

    def _select(self, block: str, node: Node) -> str:
        q, weights, keys, limit = node.args[:4]
        ratio = int(argument(node, "ratio"))
        edit = Editor(node.graph, node)
        cache, written = self._rows(block, keys, ratio, edit)
        meta, form = self._batch(block, self.group(0)), self._form(block, keys)
        given = [None if n is None else edit.call(A.select.int, n, 0, 0) for n in (q, weights, limit)]
        rest = (given[2], *node.args[4:], *([form] if form else []))
        out = edit.call(CACHED_SELECT_ROWS.overload, *given[:2], cache, written, *meta, *rest)
        for user in list(node.users):
            part = edit.call(A.unsqueeze.default, edit.item(out, int(user.args[1])), 0)  # type: ignore[arg-type]
            edit.replace(user, part)
        return f"choose {argument(node, 'top')} rows of {ratio} tokens each"

    def _attend(self, block: str, node: Node) -> str:
        q, latents, rows, chosen, sinks, scale, window, ratio = node.args
        group, full = self.group(int(window)), None  # type: ignore[arg-type]
        forms = [self._form(block, one) if one is not None else [] for one in (latents, rows)]
        latents, edit = stored(latents), Editor(node.graph, node)  # type: ignore[arg-type]
        held = tensor(latents)
        cache = self.cache(block, "window", group, (PAGE_SIZE, int(held.shape[2])), held.dtype)
        given = [None if n is None else edit.call(A.select.int, n, 0, 0) for n in (q, latents, chosen)]
        source: tuple[Node | None, ...] = (None, None)
        if rows is not None:
            source, full = self._rows(block, rows, int(ratio), edit), self.meta(block, "block_table", self.group(0))  # type: ignore[arg-type]
        meta = (*self._batch(block, group), self.meta(block, "slot", group))
        out = edit.call(
            *(CACHED_SELECTED_ATTENTION.overload, *given[:2], cache, *meta, *source, full),
            *(given[2], sinks, scale, window, *(forms if any(forms) else ())),
        )
        edit.replace(node, edit.call(A.unsqueeze.default, out, 0))
        return f"latents of window {window}" + (f" and chosen rows of {ratio} tokens each" if rows is not None else "")

    def _form(self, block: str, rows: Any) -> list[int]:
        """The form of rows, also of those that a block is given. Raises ValueError if its calls are given different."""
        if rows.op != "placeholder":
            return form_of(rows)
        makers = [self._maker(c, rows) for c in self.program.calls() if c.target == block]
        first, *others = [self._form(str(maker.target), made) for maker, made in makers]
        if others != [first] * len(others):
            raise ValueError(f"calls of {block} are given rows in different forms")
        return first

    def _rows(self, block: str, rows: Any, ratio: int, edit: Editor) -> tuple[Node, Node]:
        """The cache of rows and the slots that were written there, before they are read."""
        held = self.blocks[block]
        held.ratio[rows] = ratio
        if rows.op == "placeholder":
            if rows not in held.read:
                made = tensor(stored(self._maker(next(c for c in self.program.calls() if c.target == block), rows)[1]))
                shape = (PAGE_SIZE // ratio, int(made.shape[2]))
                with self.mode:
                    val = torch.empty((self.pages, *shape), dtype=made.dtype)
                names = f"shared_rows{len(held.read)}", f"written{len(held.read)}"
                held.read[rows] = self.hole(block, names[0], val), self.hole(block, names[1], self._slots())
            return held.read[rows]
        if rows not in held.written:
            held.written[rows] = self._write(block, rows, ratio, edit)
        return held.written[rows]

    def _write(self, block: str, rows: Node, ratio: int, edit: Editor) -> tuple[Node, Node]:
        group, rows = self.group(0), stored(rows)
        shape = (PAGE_SIZE // ratio, int(tensor(rows).shape[2]))
        cache = self.cache(block, "rows", group, shape, tensor(rows).dtype)
        slot = self.meta(block, "slot", group)
        return cache, edit.call(WRITE_ROWS.overload, edit.call(A.select.int, rows, 0, 0), cache, slot, ratio)

    # -- the skeleton -------------------------------------------------------------------------------------------------

    def finish(self) -> list[CacheSpec]:
        """Feed the new holes of every call."""
        self._share()
        places = {
            (name, rows): add_outputs(self.program, name, [written])
            for name, held in self.blocks.items()
            for rows, (_, written) in held.written.items()
        }
        names, caches = self._own()
        for call in self.program.calls():
            block = str(call.target)
            for rows, (cache, written) in self.blocks[block].read.items():
                maker, made = self._maker(call, rows)
                there = self.blocks[str(maker.target)]
                self._feed(call, cache, names[maker, there.written[made][0]])
                self._feed(call, written, item_of(maker, places[str(maker.target), made]))
        return caches

    def _share(self) -> None:
        """Let makers write what others read, where they do not yet."""
        for call in self.program.calls():
            for rows in self.blocks[str(call.target)].read:
                maker, made = self._maker(call, rows)
                block = str(maker.target)
                if made not in self.blocks[block].written:
                    graph = self.program.blocks[block].graph
                    edit, ratio = Editor(graph, graph.output_node()), self.blocks[str(call.target)].ratio[rows]
                    self.blocks[block].written[made] = self._write(block, made, ratio, edit)

    def _maker(self, call: Node, hole: Node) -> tuple[Node, Node]:
        """The call that makes what a call is given, and the node that is it in its block."""
        holes = [n for n in self.program.blocks[str(call.target)].graph.nodes if n.op == "placeholder"]
        return made_by(self.program, call.args[holes.index(hole)])

    def _own(self) -> tuple[dict[tuple[Node, Node], Node], list[CacheSpec]]:
        """Inputs of the skeleton for the caches that blocks write, by call and hole."""
        graph = self.program.skeleton.graph
        anchor = next(n for n in graph.nodes if n.op != "placeholder")
        names, caches = dict[tuple[Node, Node], Node](), list[CacheSpec]()
        stems, taken = self.program.cache_stems(), Counter[str]()
        for held in self.program.caches:
            taken[held.name.rpartition("_")[0]] += 1
        for order, call in enumerate(self.program.calls()):
            layer = call.meta["layer"] if call.meta["layer"] is not None else order
            for hole, (kind, group) in self.blocks[str(call.target)].own.items():
                stem = f"cache_{stems[call]}"
                with graph.inserting_before(anchor):
                    node = graph.placeholder(f"{stem}_{taken[stem]}")
                taken[stem] += 1
                node.meta = {"val": value(hole)}
                names[call, hole] = node
                self._feed(call, hole, node)
                shape = tuple(int(d) for d in tensor(hole).shape[1:])
                caches.append(CacheSpec(node.name, kind, group, layer, shape, tensor(hole).dtype))
        return names, caches

    def _feed(self, call: Node, hole: Node, source: Node) -> None:
        holes = [n for n in self.program.blocks[str(call.target)].graph.nodes if n.op == "placeholder"]
        at = holes.index(hole)
        call.args = (*call.args[:at], source, *call.args[at + 1 :])
