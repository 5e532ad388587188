"""Split a causal encoder-decoder: the lower half for every token of a prompt, the upper half for its last rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.fx import Graph, Node

from deepinfer_compile.boundary import Boundary, find_boundary
from deepinfer_compile.errors import BadOption, NoBoundary
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, fake_mode_of, is_op, make_module, tensor, value
from deepinfer_compile.ops import RECENT, SELECT_ROWS, SELECTED_ATTENTION
from deepinfer_compile.parts import Assembly
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.program import Program
from deepinfer_compile.shared_keys import may_share
from deepinfer_compile.skeleton import fresh

A = torch.ops.aten
KEPT = "kept"
EXAMPLE_ROWS = 3
LISTED = (RECENT.overload, SELECT_ROWS.overload, SELECTED_ATTENTION.overload)
Replay = Literal["off", "mask", "compact"]


@register
@dataclass(frozen=True)
class SplitEncoderDecoder:
    """Cut a program whose upper layers read global keys of one boundary value into encoder, boundary and decoder.

    Before: `h = layer0(e); k, v, x = layer1(h); y = layer2(x, k, v)`, layer 1 making keys of h that layers 1, 2 read
    After:  `h = layer0(e)` (encoder), `k, v = layer1(h)` (boundary), `x = layer1_decoder(s, k, v); y = layer2(x, k, v)`
            (decoder), where s is h, or with replay "compact" `s = select(h, kept)`
    `info["split"]["parts"]` says which call is of which part; `parts.part_programs` gives them as programs.
    replay: "off" runs the decoder on every token and changes no result. "compact" runs it on the rows of the input
    `kept` i64[K], the last of one sequence; everything that the decoder gives, and its input `rows`, is then of kept
    rows. "mask" runs it on all rows and lets window attention see kept ones only, which gives the same for these; other
    rows are of no meaning. keep: rows at the end of a prompt that `kept` should hold, 0 for the widest window above
    plus `backtrack`; recorded in `info["split"]["keep"]`, exact from `info["split"]["halo"]` on.
    Left alone: with require=False, a program that has no boundary: with a remark where some attention reads keys of
    further down than its queries, without one where none does. Raises NoBoundary, BadOption.
    """

    name: ClassVar[str] = "split-encoder-decoder"
    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL, Fact.FUNCTIONAL})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE
    replay: Replay = "off"
    keep: int = 0
    backtrack: int = 0
    require: bool = True

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        self._check_options()
        if "split" in program.info or not (self.require or may_share(program)):
            return program
        if self.replay != "off" and any(is_op(n, *LISTED) for gm in program.blocks.values() for n in gm.graph.nodes):
            fix = "split before raise-selected-attention, or keep rows of the program with caches (keep-last-rows)"
            raise BadOption(name="replay", value=self.replay, reason="it has chosen rows as lists", fix=fix)
        try:
            found = find_boundary(program)
        except NoBoundary as reason:
            if self.require:
                raise
            ctx.graph = "skeleton"
            ctx.miss(program.calls()[-1], str(reason.values["reason"]))
            return program
        first = found.sides.origins[found.sides.globals[0]][0]
        ctx.graph, ctx.layers = str(first.target), found.above
        return self._split(program, found) if ctx.claim(first, found.why) else program

    def _check_options(self) -> None:
        if self.replay not in ("off", "mask", "compact"):
            raise BadOption(name="replay", value=self.replay, reason="unknown", fix="use off, mask or compact")
        for name, number in (("keep", self.keep), ("backtrack", self.backtrack)):
            if number < 0:
                raise BadOption(name=name, value=number, reason="it counts rows", fix="give 0 or more")

    def _split(self, program: Program, found: Boundary) -> Program:
        sides = found.sides
        work = Assembly(program, sides)
        work.part("encoder")
        work.part("boundary")
        crossing = _read_by_decoder(found)
        work.rows.update({n: work.whole[n] for n in crossing})
        if self.replay == "compact":
            _select(work, program, found, crossing)
        elif self.replay == "mask" and found.windows:
            _mark(work, program, crossing, found)
        for hole in work.holes.values():
            work.rows.setdefault(hole, work.whole[hole])
        work.part("decoder")
        out: Any = next(n for n in reversed(sides.flat.graph.nodes) if n.op == "output").args[0]
        results = [o for o in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(o, Node)]
        return work.program_of(results, self._info(found))

    def _info(self, found: Boundary) -> dict[str, Any]:
        keep = self.keep or max(found.windows, default=1) + self.backtrack
        return {
            "replay": self.replay,
            "keep": keep,
            "halo": found.halo,
            "exact": self.replay == "off" or keep >= found.halo,
            "layer": found.layer,
            "below": list(found.below),
            "above": list(found.above),
            "crossing": [[c.shape, c.bytes] for c in found.crossing],
            "why": found.why,
        }


def kept_rows(tokens: int, keep: int, behind: int = 0) -> Tensor:
    """i64[K]: which rows of a chunk of `tokens` tokens, with `behind` more tokens of its prompt after it, are among the
    last `keep` of the prompt."""
    return torch.arange(min(tokens, max(0, tokens + behind - keep)), tokens)


def _read_by_decoder(found: Boundary) -> list[Node]:
    """Values that the decoder reads row by row and does not make: crossing ones, and inputs that run over tokens."""
    sides = found.sides
    inputs = (n for n in sides.flat.graph.nodes if n.op == "placeholder" and sides.mixing[n].held is not None)
    read = [n for n in inputs if any(u in sides.decoder for u in n.users)]
    return [*sides.crossing, *(n for n in read if n.meta.get("weight") is None)]


def _kept_input(work: Assembly, program: Program) -> Node:
    """The new input `kept`, behind the others."""
    with work.graph.inserting_before(next(n for n in work.graph.nodes if n.op != "placeholder")):
        node: Node = work.graph.placeholder(KEPT)
    node.meta = {"val": fresh(program, KEPT, (EXAMPLE_ROWS,), torch.int64, (0,))}
    return node


def _block(work: Assembly, name: str, args: list[Node], make: Any) -> list[Node]:
    """Call a new block of the decoder on skeleton nodes; `make` builds its results from its inputs."""
    graph = Graph()
    holes = [graph.placeholder(f"in{i}") for i in range(len(args))]
    for hole, arg in zip(holes, args):
        hole.meta = {"val": value(arg)}
    out = graph.output(())
    made = make(_OnFake(graph, out, args[0]), holes)
    out.args = (made[0] if len(made) == 1 else tuple(made),)
    work.add_block(name, make_module(torch.nn.Module(), graph))
    return work.call(name, args, "decoder")


def _pairs_before(found: Boundary, node: Node) -> set[Node]:
    """The values over pairs of tokens that a node is made of."""
    left, seen = [node], set[Node]()
    while left:
        for operand in left.pop().all_input_nodes:
            if operand not in seen and found.sides.mixing[operand].kind == "pair":
                seen.add(operand)
                left.append(operand)
    return seen


class _OnFake(Editor):
    """An editor of a graph that holds no value to take the fake mode from."""

    def __init__(self, graph: Graph, anchor: Node, like: Node) -> None:
        super().__init__(graph, anchor)
        self.mode = fake_mode_of(like.graph)


def _select(work: Assembly, program: Program, found: Boundary, crossing: list[Node]) -> None:
    """Pick the kept rows of all that the decoder reads row by row."""
    dims = [held.dim for n in crossing if (held := found.sides.mixing[n].held) is not None]

    def make(edit: Editor, holes: list[Node]) -> list[Node]:
        return [edit.call(A.index_select.default, h, d, holes[-1]) for h, d in zip(holes, dims)]

    args = [*(work.whole[n] for n in crossing), _kept_input(work, program)]
    work.rows.update(zip(crossing, _block(work, "select", args, make)))


def _mark(work: Assembly, program: Program, crossing: list[Node], found: Boundary) -> None:
    """Make the mask of kept rows, bool [T]. Raises BadOption where a window has no mask to add it to."""
    sides = found.sides
    for node in (n for n in sides.decoder if sides.mixing[n].mixes and sides.mixing[n].window):
        if not any(work.is_window(n) for n in (node, *_pairs_before(found, node))):
            raise BadOption(
                name="replay",
                value="mask",
                reason=f"the window of {node.name} is no mask that rows can be taken out of",
                fix="use compact",
            )
    held = found.sides.mixing[crossing[0]].held
    assert held is not None

    def make(edit: Editor, holes: list[Node]) -> list[Node]:
        size = edit.call(A.sym_size.int, holes[0], held.dim)
        none = edit.call(A.full.default, [size], False, dtype=torch.bool, device=tensor(holes[0]).device)
        return [edit.call(A.index_fill.int_Scalar, none, 0, holes[1], True)]

    work.seen = _block(work, "select", [work.whole[crossing[0]], _kept_input(work, program)], make)[0]
