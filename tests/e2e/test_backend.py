"""torch.compile(model, backend="deepinfer"): eager's results with dialect ops inside, and a stated reason where it
steps aside. Most of the architectures run in `make test-all`."""

from __future__ import annotations

import copy
import importlib.metadata
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import StaticCache

from deepinfer_compile.backend import counters, deepinfer, executed, prepare
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import is_op
from deepinfer_compile.ops import RMS_NORM
from deepinfer_compile.passbase import NONE, PassContext
from deepinfer_compile.presets import BACKEND
from tests import models

FAST = ("llama", "deepseek_v3")
NAMES = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in models.CONFIGS]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counters.clear()
    executed.clear()


def small(name: str) -> Any:
    """The first two layers, or one where they are of one kind: most of the time is Inductor's, which is a layer's."""
    if name == "gemma":
        return models.make(name)
    return models.make(name, num_hidden_layers=1 if name in FAST else 2)


def called(model: nn.Module, ids: Tensor) -> Counter[str]:
    """How many norms, attentions, routers and expert blocks one eager call runs, by dialect op."""
    found: Counter[str] = Counter()
    ends = {"RMSNorm": "rms_norm", "Attention": "attention", "Router": "route", "Gate": "route", "Experts": "experts"}

    def count(module: nn.Module, *_: object) -> None:
        for end, op in ends.items():
            if type(module).__name__.endswith(end):
                found[op] += 1

    hooks = [m.register_forward_hook(count) for m in model.modules()]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def ran() -> Counter[str]:
    """What compiled graphs executed, latent attention counted as attention."""
    names = {"latent_attention": "attention", "add_rms_norm": "rms_norm"}
    found: Counter[str] = Counter()
    for name, count in executed.items():
        found[names.get(name, name)] += count
    return found


def test_installed_name_is_this_function() -> None:
    points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="deepinfer")
    assert [p.load() for p in points] in ([deepinfer], [])  # none: the package is on the path and not installed


@pytest.mark.parametrize("name", NAMES)
def test_eval_equals_eager_and_every_block_is_an_op(name: str) -> None:
    model = small(name)
    compiled = torch.compile(model, backend=deepinfer)
    want: Counter[str] = Counter()
    for batch, length in ((1, 9), (3, 14), (2, 21)):
        ids = torch.randint(3, models.VOCAB, (batch, length))
        want += called(model, ids)
        with torch.no_grad():
            expected, got = model(ids, use_cache=False).logits, compiled(ids, use_cache=False).logits
        assert (got - expected).abs().max() < 4e-6
    assert {op: ran()[op] for op in want} == dict(want)
    assert not [reason for reason in counters if reason.startswith("left")]


@pytest.mark.parametrize("name", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_no_more_compiles_than_inductor(name: str) -> None:
    graphs = []
    for backend in (deepinfer, "inductor"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(small(name), backend=backend)
        for batch in (1, 3, 2, 5):
            with torch.no_grad():
                compiled(torch.randint(3, models.VOCAB, (batch, 11)), use_cache=False)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] <= graphs[1]


@pytest.mark.parametrize(
    "name", [n if n == "llama" else pytest.param(n, marks=pytest.mark.slow) for n in models.CONFIGS]
)
def test_one_training_step_equals_eager(name: str) -> None:
    ids = torch.randint(3, models.VOCAB, (2, 13))
    stepped = []
    model = small(name)
    for compiled in (False, True):
        trained = copy.deepcopy(model).train()
        run = torch.compile(trained, backend=deepinfer) if compiled else trained
        optimiser = torch.optim.SGD(trained.parameters(), lr=0.1)
        loss = run(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimiser.step()
        stepped.append((loss.detach(), [p.detach() for p in trained.parameters()]))
    (loss, want), (other, got) = stepped
    assert (loss - other).abs() < 1e-5
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(want, got, strict=True))
    assert counters["left: autograd is recording"] >= 1
    assert counters["raised"] == 0


@dataclass(frozen=True)
class DoubleEps:
    """A wrong pass: every norm gets twice its eps."""

    name: ClassVar[str] = "double-eps"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = NONE
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        for node in gm.graph.nodes:
            if is_op(node, RMS_NORM.overload) and ctx.claim(node, "doubled"):
                node.args = (*node.args[:2], 2 * node.args[2], *node.args[3:])


def test_passes_change_what_runs() -> None:
    """Small activations, so that eps matters: the doubled one gives what eager gives with a doubled eps."""
    model = small("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.02)
    ids = torch.randint(3, models.VOCAB, (2, 9))
    results = []
    for passes in (BACKEND, (*BACKEND, DoubleEps())):
        torch._dynamo.reset()
        with torch.no_grad():
            run = torch.compile(model, backend=deepinfer, options={"pipeline": passes})
            results.append(run(ids, use_cache=False).logits)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.variance_epsilon *= 2
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    assert (results[1] - want).abs().max() < 4e-6
    assert (results[0] - want).abs().max() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_generate_with_a_static_cache_and_left_padding(name: str) -> None:
    model = small(name)
    ids = torch.randint(3, models.VOCAB, (3, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 5, 9)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    how = {
        "attention_mask": mask,
        "max_new_tokens": 9,
        "min_new_tokens": 9,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "cache_implementation": "static",
        "disable_compile": True,
    }
    want = model.generate(ids, **how)
    model.forward = torch.compile(model.forward, backend=deepinfer)
    assert torch.equal(model.generate(ids, **how), want)
    assert ran()["attention"] > 0


def latent(batch: int, compiled: Any, model: Any, steps: int = 8) -> float:
    """Largest difference from eager over decoding steps on one static cache."""
    caches = [StaticCache(config=model.config, max_cache_len=256) for _ in range(2)]
    ids = torch.randint(3, models.VOCAB, (batch, 7 + steps), generator=torch.Generator().manual_seed(batch))
    worst = 0.0
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :7], past_key_values=cache, use_cache=True)
        for step in range(7, 7 + steps):
            at = torch.full((batch, 1), step)
            how = [{"past_key_values": cache, "use_cache": True, "position_ids": at} for cache in caches]
            want = model(ids[:, step : step + 1], **how[0]).logits
            worst = max(worst, float((compiled(ids[:, step : step + 1], **how[1]).logits - want).abs().max()))
    return worst


def test_latent_caches_are_read_and_not_expanded() -> None:
    """DeepSeek-V3 decoding on a static cache: equal to eager, no expansion over the cache, one graph more at most."""
    model = models.make("deepseek_v3", num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=16)
    seen: list[GraphModule] = []

    def watched(gm: GraphModule, example_inputs: Any) -> Any:
        seen.append(prepare(gm).gm)
        return deepinfer(gm, example_inputs)

    compiled = torch.compile(model, backend=watched)
    assert max(latent(batch, compiled, model) for batch in (1, 3, 2, 5)) < 4e-6
    assert len(seen) <= 2
    assert executed["latent_attention"] == 4 * 8
    assert executed["attention"] == 0
    width = model.config.qk_nope_head_dim + model.config.v_head_dim
    for graph in seen:
        products = [n for n in graph.graph.nodes if is_op(n, torch.ops.aten.linear.default)]
        assert not [n for n in products if n.meta["val"].shape[-1] == 16 * width and n.meta["val"].numel() > 5 * 256]


def test_options_and_modes() -> None:
    """Inductor's go to Inductor; what neither knows is an error."""
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
    x = torch.randn(3, 4)
    with torch.no_grad():
        for how in (
            {"options": {"epilogue_fusion": False, "cpp.simdlen": 256}},
            {"mode": "max-autotune-no-cudagraphs"},
        ):
            torch._dynamo.reset()
            assert torch.allclose(torch.compile(model, backend=deepinfer, **how)(x), model(x), atol=1e-6)
        for how in ({"options": {"fusion": True}}, {"mode": "fastest"}):
            torch._dynamo.reset()
            with pytest.raises(Exception, match=r"fusion|fastest"):
                torch.compile(model, backend=deepinfer, **how)(x)


def test_torch_logs_say_what_happened() -> None:
    code = (
        "import torch; from torch import nn; from deepinfer_compile.backend import deepinfer;"
        "m = nn.RMSNorm(8); c = torch.compile(m, backend=deepinfer); x = torch.ones(2, 8); c(x);"
        "torch._dynamo.reset(); torch.set_grad_enabled(False); c(x)"
    )
    env = {**os.environ, "TORCH_LOGS": "deepinfer_compile.backend"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert "left to Inductor: autograd is recording" in done.stderr
    assert "raise-rms-norm: 1 applied, 0 missed" in done.stderr
