"""Tokens chosen on the device of the logits: the same ones, and only what the host must see comes to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_compile import ops
from deepinfer_compile.runtime import sampling
from deepinfer_compile.runtime.drawing import KernelDraw
from deepinfer_compile.runtime.params import SamplingParams
from tests.runtime.fakes import HashExecutor, Oracle
from tests.runtime.test_engine import EOS, assert_right, drive, engine, prompt_of


class Kernel:
    """The operation's reference as a kernel; `rows` holds how many each call had."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, operands: Mapping[str, Tensor], results: Sequence[Tensor]) -> None:
        for name, dtype in ops.sample.NUMBERS.items():
            assert operands[name].dtype == dtype
            assert operands[name].data_ptr() % dtype.itemsize == 0
        self.rows.append(len(operands["logits"]))
        results[0].copy_(ops.SAMPLE.reference(operands["logits"], *(operands[n] for n in ops.sample.NUMBERS)))


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows came to the host, a number a time."""
    found: list[int] = []
    old = sampling._here
    monkeypatch.setattr(sampling, "_here", lambda logits: found.append(len(logits)) or old(logits))
    return found


def device(kernel: Kernel) -> HashExecutor:
    executor = HashExecutor()
    executor.draw = KernelDraw(kernel)
    return executor


PLAIN: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 3},
    {"seed": 4, "temperature": 0.6, "top_k": 5},
    {"seed": 5, "top_p": 0.7, "min_p": 0.01},
]
EDITED: list[dict[str, Any]] = [
    {"seed": 6, "presence_penalty": 0.7, "top_k": 9},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"seed": 7, "min_tokens": 6},
]


def test_nothing_comes_to_the_host_without_need(kernel: Kernel, copied: list[int]) -> None:
    target = engine(device(kernel))
    requests = [target.make(str(i), prompt_of(20, i), SamplingParams(max_tokens=12, **p)) for i, p in enumerate(PLAIN)]
    drive(target, requests)
    for request in requests:
        assert_right(request, Oracle(eos=EOS))
    assert sum(kernel.rows) == sum(len(r.output_ids) for r in requests)
    assert not copied


def test_rows_that_are_edited_are_chosen_on_the_host(kernel: Kernel, copied: list[int]) -> None:
    target = engine(device(kernel))
    kinds = [SamplingParams(max_tokens=8, **p) for p in PLAIN + EDITED]
    requests = [target.make(str(i), prompt_of(20, i), params) for i, params in enumerate(kinds)]
    drive(target, requests)
    for request in requests:
        assert_right(request, Oracle(eos=EOS))
    assert copied
    assert max(copied) <= len(EDITED)


def test_log_probabilities_change_no_token(kernel: Kernel, copied: list[int]) -> None:
    target = engine(device(kernel))
    scored = [SamplingParams(max_tokens=8, logprobs=2, prompt_logprobs=1, **p) for p in PLAIN]
    plain = [SamplingParams(max_tokens=8, **p) for p in PLAIN]
    requests = [target.make(str(i), prompt_of(20, i % 4), params) for i, params in enumerate(scored + plain)]
    drive(target, requests)
    for one, other in zip(requests[:4], requests[4:]):
        assert one.output_ids == other.output_ids
        assert len(one.logprobs) == len(one.output_ids)
        assert [s.token for s in one.logprobs] == one.output_ids
        assert len(one.prompt_logprobs) == 19
    assert copied


def test_a_row_without_a_finite_maximum_ends_alone(kernel: Kernel) -> None:
    executor = device(kernel)
    executor.poison = 7
    target = engine(executor)
    bad = target.make("bad", [*prompt_of(9), 7], SamplingParams(seed=1, max_tokens=3))
    good = target.make("good", [2, 3], SamplingParams(temperature=0, max_tokens=1))
    drive(target, [bad, good])
    assert bad.error is not None
    assert good.error is None


def test_parameters_reach_the_kernel_as_the_operation_takes_them(kernel: Kernel) -> None:
    taken: dict[str, Tensor] = {}

    def spy(operands: Mapping[str, Tensor], results: Sequence[Tensor]) -> None:
        taken.update(operands)
        kernel(operands, results)

    logits = torch.randn(3, 50)
    numbers = {
        "temperature": np.array([0, 0.5, 2], dtype=np.float32),
        "min_p": np.array([0, 0.1, 0.2], dtype=np.float32),
        "top_k": np.array([0, 7, 2**31 - 1], dtype=np.int32),
        "top_p": np.array([1, 0.9, 0.25], dtype=np.float32),
        "noise": np.array([0, 0.3, 1 - 2.0**-53]),
    }
    made = KernelDraw(spy)(logits, numbers)
    assert made.dtype == np.int64
    assert taken["logits"] is logits
    for name, wanted in numbers.items():
        assert taken[name].numpy().tolist() == wanted.tolist(), name
