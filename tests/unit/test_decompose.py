"""Graphs made functional call by call are those that torch makes by tracing them again; the rest is left to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

from deepinfer_compile.capture.decompose import Decomposed, Unknown, decomposed
from deepinfer_compile.graph import make_module, to_text


class Call(nn.Module):
    """A function of x [1, T, 6] as a module."""

    def __init__(self, run: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Any:
        return self.run(x * self.weight)


def exported(run: Callable[[Tensor], Any]) -> Any:
    with torch.no_grad():
        length = torch.export.Dim("length", min=1, max=512)
        return torch.export.export(
            Call(run).eval(), (torch.rand(1, 7, 6),), dynamic_shapes=({1: length},), strict=False
        )


def text(graph: Graph) -> str:
    """The graph with calls named in their order, inputs as they are, without assertions and unread sizes."""
    named, env = Graph(), {}
    for node in graph.nodes:
        if "assert" in str(node.target):
            continue
        if node.op == "placeholder":
            env[node] = named.placeholder(node.name)
        elif node.op == "output":
            env[node] = named.output(torch.fx.node.map_arg(node.args[0], env.__getitem__))
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = named.call_function(node.target, args, kwargs)
        env[node].meta["val"] = node.meta.get("val")
    named.eliminate_dead_code()
    return to_text(make_module(nn.Module(), named))


def divided(x: Tensor) -> Tensor:
    best = x.topk(3, -1).values
    best /= best.sum(-1, keepdim=True)
    return best + 1


def doubled_view(x: Tensor) -> Tensor:
    y = x + 1
    y[..., :2].mul_(2)
    return y


def written_copy(x: Tensor) -> Tensor:
    y = x + 1
    z = y.to(torch.float32)  # no copy
    z.mul_(2)
    return y * z


def written_before_a_view(x: Tensor) -> Tensor:
    y = x + 1
    part = y[..., 2:]
    y.mul_(2)
    return part + 1


def written_as_its_like(x: Tensor) -> Tensor:
    y = x + 1
    z = y.type_as(x)  # its own operand, which no schema says
    z.mul_(2)
    return y * z


def written_in_parts(x: Tensor) -> list[Tensor]:
    """As attention puts together what is rotated and what is not."""
    y, z, w = x.new_empty(*x.shape, 8), x[..., None] * 2, x + 1
    y[..., :3] = z.sin()
    first = y.tanh()
    y[..., 3:6] = z.expand(-1, -1, -1, 3)
    y[..., 6:] = z.square()
    w[:, :, 1:4] = z.sum(-1)[..., :3]
    return [y * 2, first, w + 1]


def part_read_after(x: Tensor) -> Tensor:
    y = x + 1
    part = y[..., :2]
    part.copy_(x[..., 2:4])
    return y * part.sum()


def part_of_itself(x: Tensor) -> Tensor:
    y = x + 1
    y[..., :2] = y[..., 2:4]
    return y


def part_of_an_input(x: Tensor) -> Tensor:
    y = x.unflatten(-1, (2, 3))
    y[..., :1] = 2 * y.sum(-1, keepdim=True)
    return y + 1


def many(x: Tensor) -> list[Tensor]:
    halves = x.unflatten(-1, (2, 3)).transpose(0, 2).flatten(2).transpose(0, 2)
    x.flatten(0, 1).chunk(2, 1)  # nobody reads it
    return [
        x.to(torch.float32) + x.double().float(),
        x.to(x.device).bfloat16().type_as(x).square(),
        x.flatten(0, 1).unflatten(-1, (2, 3)).transpose(1, 2).reshape(-1, 6).view_as(x[0]).expand_as(x) + 1,
        torch.cat([a * b for a, b in zip(x.chunk(3, -1), x.split(2, -1), strict=True)], 1),
        x.new_zeros(x.shape[1] + 2, 6)[: x.shape[1]].expand(3, -1, -1).contiguous() + x,
        x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        torch.einsum("bth,bsh->bts", x, x).softmax(-1) @ F.linear(x, x[0, :1]),
        halves.sum(0),
    ]


LEFT: dict[str, Callable[[Tensor], Any]] = {
    "a part is written": doubled_view,
    "what may be no copy is written": written_copy,
    "a view sees the write": written_before_a_view,
    "written as its like": written_as_its_like,
    "a part is read after it is written": part_read_after,
    "a part is written with another": part_of_itself,
    "a part of a view is written": part_of_an_input,
    "a size that no call has made": lambda x: x.unflatten(-1, (2, 3)).transpose(0, 2).reshape(2, -1),
    "dropout": lambda x: F.dropout(x, 0.5, False) + 1,
}


@pytest.mark.parametrize("run", [many, divided, written_in_parts])
def test_what_torch_makes_of_it(run: Callable[[Tensor], Any]) -> None:
    program = exported(run)
    done, graph = decomposed(program)
    assert done is program
    assert text(graph) == text(program.run_decompositions({}).graph)


def test_the_rest_is_left_to_torch() -> None:
    program = exported(doubled_view)
    done, graph = decomposed(program)
    assert done is not program
    assert text(graph) == text(program.run_decompositions({}).graph)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_known(name: str) -> None:
    with pytest.raises(Unknown):
        Decomposed(exported(LEFT[name]).graph)


def alike(x: Tensor) -> list[Tensor]:
    """Composite calls of one form with other operands, one operand twice, and other numbers."""
    y = x + 1
    same = [v.reshape(-1, 3).type_as(w).flatten() for v, w in ((x, y), (y, x), (y, y))]
    return [*same, *x.chunk(2, -1), *y.chunk(2, -1), *y.chunk(3, -1), x.to(torch.float32), x.to(torch.float64)]


def test_calls_of_one_form_are_taken_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    recipe = Decomposed.recipe
    monkeypatch.setattr(
        Decomposed, "recipe", lambda self, node: (taken.append(str(node.target)), recipe(self, node))[1]
    )
    program = exported(alike)
    _, graph = decomposed(program)
    assert text(graph) == text(program.run_decompositions({}).graph)
    assert taken.count("aten.reshape.default") == 1
    assert taken.count("aten.flatten.using_ints") == 1
    values = [id(node.meta["val"]) for node in graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert len(set(values)) == len(values)
