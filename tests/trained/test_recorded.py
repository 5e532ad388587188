"""A recorded step is the step: loss curves of both agree on a GPU, within what atomics and bf16 leave open (3%)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.trained import data
from tests.trained.loop import Optimizer, Plan, Stepper
from tests.trained.small import few, job_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA device")]


@pytest.mark.parametrize("kind", ["ced", "draft", "v3"])
def test_recorded_steps_are_the_steps(kind: str, tmp_path: Path) -> None:
    data.prepare(tmp_path, few(), size=400)
    recorded, launched = (_curve(kind, tmp_path, graph) for graph in (True, False))
    torch.testing.assert_close(torch.tensor(recorded), torch.tensor(launched), rtol=0.03, atol=0.01)
    assert recorded[-1] < recorded[0]


def _curve(kind: str, folder: Path, graph: bool) -> list[float]:
    """The minimised loss of steps after three on the first batch at rate 0, which recording takes to warm up."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    job = job_of(kind, folder, tokenizer, folder, device="cuda", batch=16, length=256)
    optimizer = Optimizer(job.trained, Plan(1.0, 3e-3, folder, graph=graph))
    job.draw(0.5)
    stepper = Stepper(job, optimizer, graph=graph)
    for _ in range(0 if graph else 3):
        stepper.step()
    stepper.read(1)
    curve = []
    for _ in range(8):
        optimizer.set_rate(0.2)
        job.draw(0.5)
        stepper.step()
        curve.append(stepper.read(1)[0])
    return curve
