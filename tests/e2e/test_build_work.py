"""What a build does, counted: with twice the layers of the same kinds no more is traced, evaluated or tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepinfer_compile import capture as capturing
from deepinfer_compile import graph, match_experts, verify
from deepinfer_compile.capture import capture, decompose
from deepinfer_compile.capture.source import meta_model
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.phases import phase_programs
from deepinfer_compile.presets import default
from tests import models
from tests.bench.bench_build import roles


def v41(layers: int) -> nn.Module:
    return tiny.make(hc_sinkhorn_iters=2, **roles(layers)).requires_grad_(False)


def mixture(layers: int) -> nn.Module:
    model: nn.Module = meta_model(models.config("olmoe", num_hidden_layers=layers), torch.float32)
    return model


def work(model: nn.Module, patch: pytest.MonkeyPatch) -> Counter[str]:
    """What capture and passes do for a model."""
    done: Counter[str] = Counter()

    def counted(module: Any, name: str, count: Callable[[Any, Any], int], what: str) -> None:
        run = getattr(module, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            out = run(*args, **kwargs)
            done[what] += count(args, out)
            return out

        patch.setattr(module, name, counting)

    def is_call(args: Any, _: Any) -> int:
        return int(hasattr(args[0], "_schema"))  # skeletons pick results of calls, some for each layer

    counted(capturing, "export_packed", lambda _, out: len(out.gm.graph.nodes), "traced")
    counted(decompose.Decomposed, "called", lambda *_: 1, "decomposed")
    counted(verify, "evaluate", is_call, "verified")
    counted(graph, "evaluate", is_call, "made")
    counted(match_experts, "given_choice", lambda *_: 1, "tried")
    program, _ = default().run(capture(model))
    programs, _ = phase_programs(program, {})
    blocks = {id(gm) for p in (program, *programs.values()) for gm in p.blocks.values()}
    done["blocks"] = len(blocks)
    done["layers"] = len({call.meta.get("layer") for call in program.calls()} - {None})
    return done


def check(make: Callable[[int], nn.Module], fewer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for layers in (fewer, 2 * fewer):
        with monkeypatch.context() as patch:
            found.append(work(make(layers), patch))
        assert found[-1].pop("layers") == layers
    assert found[0] == found[1]
    assert found[0]["decomposed"] > 0
    # each call is evaluated once, and not again after every pass
    assert 0 < found[0]["verified"] <= found[0]["traced"]


def test_work_is_flat_in_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    check(mixture, 8, monkeypatch)


@pytest.mark.slow
def test_work_is_flat_in_layers_of_ten_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    check(v41, 20, monkeypatch)
