"""Stacked shifts of a sequence as what came just before each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op, tensor, value
from deepinfer_compile.match import equal_size
from deepinfer_compile.ops import RECENT
from deepinfer_compile.passbase import NONE, PassContext, register

A = torch.ops.aten


@register
@dataclass(frozen=True)
class RaiseRecent:
    """Replace slices of a padded sequence, one token apart and stacked, by deepinfer::recent.

    Before: `line = pad(x[1,T,D], [0, 0, n - 1, 0]); stack([line[:, 0:T], line[:, 1:T+1], ...], 2)`
    After:  `recent(x, None, n)`; with the newest first, that flipped
    Also where a value stands before the start, the same for every sequence (`cat([expand(v), x], 1)`).
    Left alone: slices that are more than a token apart, or that reach behind the token, and other paddings.
    """

    name: ClassVar[str] = "raise-recent"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        for node in list(gm.graph.nodes):
            found = _shifts(node)
            if found is None:
                continue
            line, starts = found
            padded = _padded(line)
            count = len(starts)
            newest_first = starts == list(range(count - 1, -1, -1))
            if padded is None or padded[2] != count - 1 or not (newest_first or starts == list(range(count))):
                ctx.miss(node, "shifts of a sequence that are not those of the tokens before each")
                continue
            if not ctx.claim(node, f"the last {count} tokens, {'newest' if newest_first else 'oldest'} first"):
                continue
            x, fill, _ = padded
            edit = Editor(gm.graph, node)
            rows = edit.call(RECENT.overload, x, fill, count)
            rows = edit.call(A.flip.default, rows, [2]) if newest_first else rows
            at = int(argument(node, "dim")) % tensor(node).dim()
            edit.replace(node, rows if at == 2 else edit.call(A.movedim.int, rows, 2, at))


def _shifts(node: Node) -> tuple[Node, list[int]] | None:
    """(line, starts) of a stack of slices of one line along its tokens, each as long as the sequence."""
    if not is_op(node, A.stack.default):
        return None
    slices: Any = node.args[0]
    if len(slices) < 2 or not all(is_op(s, A.slice.Tensor) and argument(s, "dim") == 1 for s in slices):
        return None
    line = slices[0].args[0]
    starts = [argument(s, "start") for s in slices]
    if any(s.args[0] is not line for s in slices) or not all(isinstance(start, int) for start in starts):
        return None
    length = tensor(line).shape[1] - (len(slices) - 1)
    fits = all(equal_size(tensor(s).shape[1], length) for s in slices) and isinstance(length, torch.SymInt)
    return (line, starts) if fits else None


def _padded(line: Node) -> tuple[Node, Node | None, int] | None:
    """(x, what stands before its start, how many times) of a line."""
    if is_op(line, A.pad.default, A.constant_pad_nd.default):
        pad = list(argument(line, "pad"))
        behind = 2 * (tensor(line).dim() - 2)
        zero = argument(line, "mode", "constant") == "constant" and not argument(line, "value", None)
        fits = zero and len(pad) == behind + 2 and not any(pad[:behind]) and pad[behind + 1] == 0
        return (line.args[0], None, int(pad[behind])) if fits else None  # type: ignore[return-value]
    if not is_op(line, A.cat.default) or argument(line, "dim") not in (1, 1 - tensor(line).dim()):
        return None
    parts: Any = line.args[0]
    if len(parts) != 2 or not is_op(parts[0], A.expand.default) or value(parts[0].args[0]).dim() != 0:
        return None
    count = tensor(parts[0]).shape[1]
    return (parts[1], parts[0].args[0], count) if isinstance(count, int) else None
