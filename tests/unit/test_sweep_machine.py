"""The GPU of a sweep without a GPU: kernels are compiled for one, and a stand-in says what the driver would say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from deepinfer_compile.sweep_machine import SPILLED, Gpu, Unfit
from deepinfer_compile.targets.nvidia import SM90
from tests.sweeping import spec_of

LINEAR = spec_of("linear")
PARAMS = LINEAR.params(256, 48, torch.bfloat16, False, 16)
CONFIG = LINEAR.config(block_t=16, block_n=16, block_k=64, split=2, num_warps=4, num_stages=2)


class Driver:
    """A GPU's without the GPU. words: what a kernel spills. shared: the most that a program may have.

    It gives no module, which Triton would unload by a driver that is no longer there.
    """

    def __init__(self, device: int, words: int = 0, shared: int = SM90.limits.shared_bytes) -> None:
        self._device = device
        self.loaded: list[str] = []
        self.launcher_cls = lambda source, metadata: lambda *args: None
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": shared},
            load_binary=lambda name, *rest: self.loaded.append(name) or (None, 2, 40, words, 1024),
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"there is no GPU to ask for {name}")


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with Gpu(SM90.name, "no GPU", SM90.limits, torch.device("cpu")) as machine:
        yield machine


def operands() -> dict[str, torch.Tensor]:
    x, weight = torch.randn(3, 256).bfloat16(), torch.randn(48, 256).bfloat16()
    return {"x": x, "weight": weight}


def test_binaries_are_loaded_and_memory_is_there(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(71, words=SPILLED)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    call = gpu.prepare(LINEAR, PARAMS, CONFIG, operands())
    assert driver.loaded == ["linear", "join"]
    assert [name for name, _ in call.launches] == ["linear", "join"]  # type: ignore[attr-defined]
    assert call.tensors.keys() == {"x", "weight", "out", "part"}
    assert call.tensors["part"].shape == (2, 3, 48)


def test_what_spills_or_does_not_fit_is_unfit(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(72, words=SPILLED + 1))
    with pytest.raises(Unfit, match="linear spills 513 words a thread, more than 512"):
        gpu.prepare(LINEAR, PARAMS, CONFIG, operands())
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(73, shared=100))
    with pytest.raises(Unfit, match=r"OutOfResources: .*shared memory"):
        gpu.prepare(LINEAR, PARAMS, CONFIG, operands())


def test_workers_are_asked_with_shapes_alone(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = []
    monkeypatch.setattr(gpu._pool, "reasons", lambda given: jobs.extend(given) or [""] * len(given))
    assert gpu.compile(LINEAR, PARAMS, [CONFIG, CONFIG], operands()) == ["", ""]
    assert jobs[0]["operands"] == {"x": [[3, 256], [256, 1], "bfloat16"], "weight": [[48, 256], [256, 1], "bfloat16"]}
    assert jobs[0]["config"] == vars(CONFIG)
    assert jobs[0]["params"]["dtype"] == {"dtype": "bfloat16"}
