"""Choose the order of products of latent attention for a program.

Both orders give the same numbers and read the same cache. Per context row and head, n queries of a request cost
n (2 dl + dr) multiply-adds absorbed and dl (dn + dv) + n (dn + dr + dv) expanded, so absorbed is cheaper below
dl (dn + dv) / (2 dl - dn - dv) queries: a decode step is far below, a long prefill far above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from deepinfer_compile.errors import BadOption
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import argument, is_op, tensor
from deepinfer_compile.match_moe import operand
from deepinfer_compile.ops import CACHED_LATENT_ATTENTION
from deepinfer_compile.ops.latent import FORMS
from deepinfer_compile.passbase import NONE, PassContext, register


@register
@dataclass(frozen=True)
class ChooseLatentForm:
    """Set the form of every cached latent attention.

    Before: `o = cached_latent_attention(..., scale, 'expanded')`
    After:  `o = cached_latent_attention(..., scale, 'absorbed')` with form="absorbed"
    Left alone: calls that have the form already.
    """

    name: ClassVar[str] = "choose-latent-form"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CACHED})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.FORMS})
    breaks: ClassVar[frozenset[Fact]] = NONE
    form: str = "absorbed"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise BadOption(
                name="choose-latent-form.form", value=self.form, reason="no such form", fix=f"use one of {FORMS}"
            )

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        for node in gm.graph.nodes:
            if not is_op(node, CACHED_LATENT_ATTENTION.overload):
                continue
            if argument(node, "form") == self.form:
                ctx.miss(node, f"it is {self.form} already")
            elif ctx.claim(node, f"{self.form}: {_reason(node)}"):
                node.args = (*node.args[:-1], self.form)


def _reason(node: Node) -> str:
    """Where the two forms cost the same."""
    nope = int(tensor(operand(node, 4)).shape[1])
    latent, width = (int(d) for d in tensor(operand(node, 5)).shape[1:])
    saved = 2 * latent - nope - width
    if saved <= 0:
        return "with these widths absorbed is cheaper for any number of queries"
    return f"absorbed is cheaper below {latent * (nope + width) / saved:.0f} queries a request"
