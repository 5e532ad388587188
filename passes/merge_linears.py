"""Linears of one input as one call, where the target has a kernel for several weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op, tensor
from deepinfer_compile.kernels import is_large
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.runtime.interpret import resolve


@register
@dataclass(frozen=True)
class MergeLinears:
    """Call sibling linears (query, key and value; gate and up) together; the weights stay apart.

    Before: `q = deepinfer_cpu.linear(x, wq, None); k = deepinfer_cpu.linear(x, wk, None)`
    After:  `both = deepinfer_cpu.linears(x, [wq, wk], [None, None]); q = both[0]; k = both[1]`
    Left alone: a linear whose operands are only made after its first sibling runs.
    `one` and `many` name the kernel for one weight and the one for several; with either empty the pass does nothing.
    `most`: weights of one call, 0 for any number. `large`: only weights that are together worth a launch of ours.
    """

    name: ClassVar[str] = "merge-linears"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CACHED})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE
    one: str = ""
    many: str = ""
    most: int = 0
    large: bool = False

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        if not self.one or not self.many:
            return
        order = {n: i for i, n in enumerate(gm.graph.nodes)}
        families: dict[Node, list[Node]] = {}
        for node in gm.graph.nodes:
            if is_op(node, resolve(f"{self.one}.default")):
                families.setdefault(node.args[0], []).append(node)  # type: ignore[arg-type]
        for first, *rest in families.values():
            ready = [n for n in rest if all(order[i] < order[first] for i in n.all_input_nodes)]
            for late in [n for n in rest if n not in ready]:
                ctx.miss(late, f"an operand is made after {first.name}, its first sibling")
            for nodes in self._calls([first, *ready]):
                if ctx.claim(nodes[0], f"{len(nodes)} weights of one input, {self.many}"):
                    _merge(nodes, self.many)

    def _calls(self, family: list[Node]) -> Iterator[list[Node]]:
        """The linears of each merged call."""
        most = self.most or len(family)
        for nodes in (family[i : i + most] for i in range(0, len(family), most)):
            if len(nodes) > 1 and (not self.large or is_large(*(tensor(n.args[1]) for n in nodes))):  # type: ignore[arg-type]
                yield nodes


def _merge(nodes: list[Node], many: str) -> None:
    edit = Editor(nodes[0].graph, nodes[0])
    x, weights, biases = zip(*(_operands(n) for n in nodes))
    together = edit.call(resolve(f"{many}.default"), x[0], list(weights), list(biases))
    for i, node in enumerate(nodes):
        edit.replace(node, edit.item(together, i))


def _operands(node: Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of a linear, under whatever names its schema has for them."""
    x, weight, bias = (argument(node, a.name) for a in node.target._schema.arguments)  # type: ignore[union-attr]
    return x, weight, bias
