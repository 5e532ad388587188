"""Blocks some of whose nodes have kernels: which one a node gets, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_compile.errors import BundleCorrupt
from deepinfer_compile.graphjson import to_json
from deepinfer_compile.runtime.kernel_blocks import LIBRARY, StepState, kernel_block

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
