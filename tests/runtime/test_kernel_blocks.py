"""Blocks some of whose nodes have kernels: which one a node gets, and what it is given."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_compile import ops
from deepinfer_compile.errors import BundleCorrupt
from deepinfer_compile.graphjson import to_json
from deepinfer_compile.runtime.interpret import GraphFunction
from deepinfer_compile.runtime.kernel_blocks import LIBRARY, StepState, kernel_block, waits

A = torch.ops.aten


def graph(biased: bool) -> dict[str, Any]:
    made = torch.fx.Graph()
    names = ["x", "weight", "bias"][: 2 + biased]
    inputs = [made.placeholder(name) for name in names]
    shapes = {"x": (1, 3, 8), "weight": (5, 8), "bias": (5,)}
    for node in inputs:
        node.meta["val"] = torch.zeros(shapes[node.name])
    linear = made.call_function(A.linear.default, tuple(inputs))
    linear.meta["val"] = torch.zeros(1, 3, 5)
    made.output(linear)
    return to_json(torch.fx.GraphModule(torch.nn.Module(), made))


class Files:
    """A bundle of one block file."""

    def __init__(self, block: dict[str, Any]) -> None:
        self.block = block

    def json(self, path: str) -> dict[str, Any]:
        return self.block


class Kernel:
    """A linear layer that notes what it is given."""

    def __init__(self) -> None:
        self.calls: list[set[str]] = []

    def __call__(self, operands: Mapping[str, Tensor], results: Sequence[Tensor]) -> None:
        self.calls.append(set(operands))
        results[0].copy_(functional.linear(operands["x"], operands["weight"], operands.get("bias")) + 1)


def block(stored: dict[str, Any], choices: list[list[Any]], kernel: Kernel, state: StepState) -> Any:
    node = next(n["name"] for n in stored["nodes"] if n["op"] == "call")
    entry = {"op": "aten.linear", "kernel": "linear", "choices": choices}
    files = Files({"graph": stored, "programs": {"decode": {"kernels": {node: entry}, "left": {}}}})
    return kernel_block(files, "block.json", "decode", stored, lambda name, path: kernel, state, "")  # type: ignore[arg-type]


@pytest.mark.parametrize("biased", [False, True])
def test_few_tokens_go_to_the_kernel_and_more_to_the_library(biased: bool) -> None:
    kernel, state = Kernel(), StepState()
    run = block(graph(biased), [[2, "k"], [None, LIBRARY]], kernel, state)
    inputs = [torch.randn(1, 3, 8), torch.randn(5, 8), torch.randn(5)][: 2 + biased]
    plain = functional.linear(*inputs)
    for tokens, wanted in ((2, plain + 1), (3, plain), (1, plain + 1)):
        state.tokens = tokens
        torch.testing.assert_close(run(*inputs), wanted)
    assert kernel.calls == [{"x", "weight", "bias"} if biased else {"x", "weight"}] * 2


def test_the_last_choice_has_no_limit() -> None:
    with pytest.raises(BundleCorrupt, match="any number of tokens"):
        block(graph(False), [[2, "k"]], Kernel(), StepState())


def siblings(merged: bool, outputs: int = 2) -> dict[str, Any]:
    """Two linear layers of one input, as two calls or as one."""
    made = torch.fx.Graph()
    shapes = {"x": (1, 3, 8), "v": (5, 8), "w": (2, 8), "bias": (2,)}
    for name, shape in shapes.items():
        made.placeholder(name).meta["val"] = torch.zeros(shape)
    x, v, w, bias = made.nodes
    if merged:
        both = made.call_function(ops.LINEARS.overload, (x, [v, w], [None, bias]))
        both.meta["val"] = [torch.zeros(1, 3, 5), torch.zeros(1, 3, 2)]
        results = [made.call_function(operator.getitem, (both, n)) for n in range(2)]
    else:
        results = [made.call_function(A.linear.default, given) for given in ((x, v), (x, w, bias))]
    for node, width in zip(results, (5, 2)):
        node.meta["val"] = torch.zeros(1, 3, width)
    made.output(tuple(results[:outputs]))
    return to_json(torch.fx.GraphModule(torch.nn.Module(), made))


def open_siblings(own: Any, kernel: Any, state: StepState) -> Any:
    node = next(n["name"] for n in siblings(merged=True)["nodes"] if n["op"] == "call")
    entry = {"op": "deepinfer.linears", "kernel": "linears", "choices": [[2, "k"], [None, LIBRARY]]}
    files = Files({"graph": own, "programs": {"decode": {"kernels": {node: entry}, "left": {}}}})
    stored = siblings(merged=False)
    return kernel_block(files, "block.json", "decode", stored, lambda name, path: kernel, state, "")  # type: ignore[arg-type]


def test_a_target_may_have_another_form_of_the_block_whose_lists_reach_the_kernel_one_by_one() -> None:
    seen: list[set[str]] = []

    def kernel(operands: Mapping[str, Tensor], results: Sequence[Tensor]) -> None:
        seen.append(set(operands))
        results[0].copy_(functional.linear(operands["x"], operands["weights_0"]) + 1)
        results[1].copy_(functional.linear(operands["x"], operands["weights_1"], operands["biases_1"]) + 2)

    state = StepState()
    run = open_siblings(siblings(merged=True), kernel, state)
    x, v, w, bias = torch.randn(1, 3, 8), torch.randn(5, 8), torch.randn(2, 8), torch.randn(2)
    for tokens, first, second in ((2, 1, 2), (3, 0, 0), (1, 1, 2)):
        state.tokens = tokens
        one, two = run(x, v, w, bias)
        torch.testing.assert_close(one, functional.linear(x, v) + first)
        torch.testing.assert_close(two, functional.linear(x, w, bias) + second)
    assert seen == [{"x", "weights_0", "weights_1", "biases_1"}] * 2


def test_another_form_takes_and_gives_what_the_block_does_or_is_refused() -> None:
    fewer, renamed, wider, loose = (siblings(merged=True, outputs=2 - (i == 0)) for i in range(4))
    renamed["nodes"][0]["name"] = "y"
    wider["nodes"][1]["val"]["shape"] = [6, 8]
    loose["nodes"][-1]["args"] = [{"tuple": [{"ref": "lost"}]}]
    for own in (fewer, renamed, wider, loose, {"nodes": []}, {"nodes": [{}]}, None, 3):
        with pytest.raises(BundleCorrupt, match=r"block\.json"):
            open_siblings(own, None, StepState())


@pytest.mark.parametrize(
    ("by", "held"), [(torch.tensor([1, 0]), False), (torch.tensor([True, False, True]), True)], ids=["numbers", "mask"]
)
def test_what_has_a_size_of_values_waits(by: Tensor, held: bool) -> None:
    """Taking rows by numbers is nothing to wait for: how many there are is known."""
    made = torch.fx.Graph()
    x, i = made.placeholder("x"), made.placeholder("i")
    x.meta["val"], i.meta["val"] = torch.zeros(3, 2), by
    taken = made.call_function(A.index.Tensor, (x, [i]))
    taken.meta["val"] = torch.zeros(2, 2)
    made.output(taken)
    function = GraphFunction(to_json(torch.fx.GraphModule(torch.nn.Module(), made)))
    assert waits(function) is held
    assert function(torch.arange(6.0).view(3, 2), by).shape == (2, 2)
