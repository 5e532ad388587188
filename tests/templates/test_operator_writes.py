"""What torch believes a kernel writes: an operand that it takes for written is copied at every call, and a weight of an
expert layer is gigabytes. Triton's front end runs here as for a GPU; nothing is compiled or launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget

from deepinfer_compile.kernel_ops import OURS, operator
from deepinfer_compile.kernels import AnySpec, Case, Limits, specs

LIMITS = Limits(("float32", "bfloat16"), "cuda", shared_bytes=227 * 1024, cores=132, max_warps=32)
CASES = [
    pytest.param(spec, c, id=f"{spec.op.name}-{c.name}")
    for spec in specs()
    if spec.op.name in OURS
    for c in [c for c in spec.cases if 0 < sum(c.lengths) <= 1000][1:4]
]
KNOWN = {"ids"}
"""The place of a pair follows from the ids, which torch takes for writing them: a few numbers a token."""


class NoGpu:
    """Stands for the driver: the front end asks it for the target alone."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"there is no GPU to ask for {name}")


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_operands_are_not_taken_for_written(spec: AnySpec, case: Case[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", NoGpu())
    given = spec.inputs(case, torch.Generator().manual_seed(0))
    kernel = operator(spec, case.params, spec.default(case.params, LIMITS, sum(case.new)))
    tensors = [given[name] for name in kernel.operands]
    traced = make_fx(lambda *t: kernel.overload(*t), tracing_mode="symbolic", pre_dispatch=True)(*tensors)
    written: set[str] = set()
    seen: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: Any) -> GraphModule:
        seen.append(gm)
        for node in gm.graph.nodes:
            written.update(node.kwargs.get("tensors_to_clone", ()) if "triton_kernel" in str(node.target) else ())
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(traced, backend=aot_autograd(fw_compiler=keep), dynamic=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="no GPU"):
        compiled(*tensors)
    assert seen
    made = {b.name for plan in [spec.plan(case.params, spec.default(case.params, LIMITS, sum(case.new)))]
            for b in (*plan.results, *plan.scratch)}  # fmt: skip
    assert written & made
    assert written - made <= KNOWN
