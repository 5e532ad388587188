"""The training loop: AdamW, a schedule by elapsed time, one CUDA graph a step, checkpoints that survive a kill.

A stage is given minutes, not steps: the learning rate follows the fraction of its time that is over, so that it has
come down when the time is up, whatever the machine. On a GPU the whole step (forward, backward, clipping, update,
router biases) is recorded once and replayed, because the models are so small that launching their kernels one by one
would take most of the time. Every SAVE seconds weights, moments and the time used are written beside the model and
renamed into place; a run started with `resume` goes on from there.
"""

from __future__ import annotations

import csv
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SAVE = 30.0
CLIP = 1.0
WARM, HOLD, LAST = 0.02, 0.3, 0.02
"""Rising until WARM, the full rate until HOLD, then straight down to LAST of it."""


class Job(Protocol):
    """One stage: which tensors it trains, how a batch is drawn, what is minimised.

    `trained`: the parameters that get gradients. `kept`: all tensors that a checkpoint must hold. `columns`: names of
    what `loss` returns; its first entry is minimised. `curve`: the file of its loss curve. `tokens`: of one step.
    `loss` and `settle` are recorded into a graph: they read fixed buffers, which `draw` fills, and read nothing back.
    """

    name: str
    trained: dict[str, Tensor]
    kept: dict[str, Tensor]
    columns: tuple[str, ...]
    curve: str
    tokens: int

    def draw(self, fraction: float) -> None:
        """Fills the buffers for one step; `fraction` of the stage's time is over."""

    def loss(self) -> Tensor:
        """[k], differentiable in its first entry."""

    def settle(self) -> None:
        """What follows the update: router biases."""

    def export(self) -> None:
        """Writes the model as it is now."""


@dataclass(frozen=True)
class Plan:
    """`seconds` for the stage, the highest learning `rate`, `steps` between two rows of the loss curve."""

    seconds: float
    rate: float
    folder: Path
    graph: bool
    decay: float = 0.1
    steps: int = 10
    resume: bool = False


def rate_at(fraction: float) -> float:
    """The share of the highest learning rate after a fraction of the time."""
    rising = min(fraction / WARM, 1.0)
    falling = min(max((1.0 - fraction) / (1.0 - HOLD), 0.0), 1.0)
    return rising * max(falling, LAST)


class Optimizer:
    """AdamW whose rate can change under a recorded graph. Only matrices decay; tables and mixing weights do not."""

    def __init__(self, trained: dict[str, Tensor], plan: Plan) -> None:
        self.trained, self.plan = trained, plan
        self.device = next(iter(trained.values())).device
        on_gpu = self.device.type == "cuda"
        decays = {
            n
            for n, p in trained.items()
            if p.ndim > 1 and not n.endswith(("_fn", "embed.weight", "embed_tokens.weight"))
        }
        groups = [
            {"params": [p for n, p in trained.items() if n in decays], "weight_decay": plan.decay},
            {"params": [p for n, p in trained.items() if n not in decays], "weight_decay": 0.0},
        ]
        rate = torch.zeros((), device=self.device) if on_gpu else 0.0
        self.inner = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu)
        for p in trained.values():
            count = torch.zeros((), device=self.device if on_gpu else "cpu")
            self.inner.state[p] = {"step": count, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def set_rate(self, fraction: float) -> None:
        """The rate for the next steps."""
        rate = self.plan.rate * rate_at(fraction)
        for group in self.inner.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def update(self) -> None:
        """One clipped step with the gradients there are."""
        torch.nn.utils.clip_grad_norm_(list(self.trained.values()), CLIP)
        self.inner.step()

    def tensors(self) -> dict[str, Tensor]:
        """The state by parameter name, live."""
        parts = ("step", "exp_avg", "exp_avg_sq")
        return {f"{n}/{part}": self.inner.state[p][part] for n, p in self.trained.items() for part in parts}


class Stepper:
    """One training step of a job; as a recorded graph if asked. Sums of what it returns stay on the device."""

    def __init__(self, job: Job, optimizer: Optimizer, graph: bool) -> None:
        self.job, self.optimizer = job, optimizer
        self.sums = torch.zeros(len(job.columns), device=optimizer.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if graph:
            self._record()

    def step(self) -> None:
        """One step on the batch that was drawn."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()

    def read(self, steps: int) -> list[float]:
        """The means over the last steps; waits for the device."""
        values: list[float] = (self.sums / steps).tolist()
        self.sums.zero_()
        return values

    def _step(self) -> None:
        self.optimizer.inner.zero_grad(set_to_none=True)
        values = self.job.loss()
        values[0].backward()
        self.optimizer.update()
        self.job.settle()
        self.sums += values.detach()

    def _record(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.inner.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()
        self.sums.zero_()


def train(job: Job, plan: Plan) -> None:
    """Runs a stage for its time, or for what is left of it.

    Raises FloatingPointError, the last checkpoint left as it was, when a loss is no longer a number.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    optimizer = Optimizer(job.trained, plan)
    used, done = _restore(job, optimizer, plan) if plan.resume else (0.0, 0)
    _trim(plan.folder / job.curve, done)
    if used >= plan.seconds:
        return
    optimizer.set_rate(used / plan.seconds)
    job.draw(used / plan.seconds)
    stepper = Stepper(job, optimizer, plan.graph)
    began = saved = time.monotonic()
    before = used
    while used < plan.seconds:
        for _ in range(plan.steps):
            job.draw(used / plan.seconds)
            optimizer.set_rate(used / plan.seconds)
            stepper.step()
        done += plan.steps
        means = stepper.read(plan.steps)
        if not all(map(math.isfinite, means)):
            raise FloatingPointError(f"{job.name}: {means} near step {done}: use --resume with a smaller --rate")
        used = before + time.monotonic() - began
        _log(job, plan.folder / job.curve, done, used, means)
        if time.monotonic() - saved > SAVE:
            _save(job, optimizer, plan, used, done)
            saved = time.monotonic()
    _save(job, optimizer, plan, used, done)


def _save(job: Job, optimizer: Optimizer, plan: Plan, used: float, done: int) -> None:
    tensors = {n: t.detach().cpu().contiguous() for n, t in {**job.kept, **optimizer.tensors()}.items()}
    part = plan.folder / f"{job.name}.state.safetensors.part"
    save_file(tensors, part, metadata={"used": str(used), "done": str(done)})
    part.rename(plan.folder / f"{job.name}.state.safetensors")
    job.export()


@torch.no_grad()
def _restore(job: Job, optimizer: Optimizer, plan: Plan) -> tuple[float, int]:
    """Seconds and steps a stage has behind it; 0 where no checkpoint of it exists."""
    path = plan.folder / f"{job.name}.state.safetensors"
    if not path.exists():
        return 0.0, 0
    with safe_open(path, framework="pt") as file:
        for name, tensor in {**job.kept, **optimizer.tensors()}.items():
            tensor.copy_(file.get_tensor(name))
        about = file.metadata()
    return float(about["used"]), int(about["done"])


def _trim(path: Path, done: int) -> None:
    """Keeps the rows of the loss curve up to the step that training goes on from."""
    if not path.exists():
        return
    head, *rows = path.read_text().splitlines()
    kept = [row for row in rows if int(row.split(",")[1]) <= done]
    path.write_text("\n".join([head, *kept]) + "\n")


def _log(job: Job, path: Path, done: int, used: float, means: list[float]) -> None:
    """One row of the loss curve."""
    fresh = not path.exists()
    row = [job.name, str(done), f"{used:.1f}", str(done * job.tokens), *(f"{value:.4f}" for value in means)]
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if fresh:
            writer.writerow(["stage", "step", "seconds", "tokens", *job.columns])
        writer.writerow(row)
    print(" ".join([*row[:4], *(f"{n}={v:.4f}" for n, v in zip(job.columns, means))]), flush=True)
