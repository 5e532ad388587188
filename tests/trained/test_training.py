"""A few steps of every stage on tiny shapes: losses fall, a killed run goes on, saved files give the same numbers."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_compile.models.deepseek_v41.generate import generate
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from tests.trained import ced_draft, ced_forward, ced_model, data, evaluate, fast, jobs, v3_job, v3_model
from tests.trained import train as train_command
from tests.trained.loop import HOLD, LAST, WARM, Job, Optimizer, Plan, Stepper, rate_at, train
from tests.trained.small import V3, ced_of, few, job_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tokens")
    data.prepare(where, few(), size=400)
    return where


@pytest.fixture(scope="module")
def tokenizer(prepared: Path) -> Tokenizer:
    return Tokenizer.from_file(str(prepared / "tokenizer.json"))


def steps(job: Job, plan: Plan, count: int) -> list[float]:
    optimizer = Optimizer(job.trained, plan)
    stepper = Stepper(job, optimizer, graph=False)
    for _ in range(count):
        job.draw(0.5)
        optimizer.set_rate(0.2)
        stepper.step()
    return stepper.read(count)


@pytest.mark.parametrize("kind", ["ced", "draft", "v3"])
def test_the_loss_falls_and_only_the_stages_own_weights_move(
    kind: str, prepared: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    job = job_of(kind, prepared, tokenizer, tmp_path)
    plan = Plan(1.0, 1e-2, tmp_path, graph=False)
    before = {n: t.clone() for n, t in job.kept.items()}
    first, last = steps(job, plan, 3), steps(job, plan, 18)
    assert all(torch.isfinite(torch.tensor(last)))
    assert last[1] < first[1] - 0.1, f"{job.columns[1]}: {first[1]} then {last[1]}"
    moved = {n for n, t in job.kept.items() if not torch.equal(t, before[n])}
    allowed = set(job.trained) | {n for n in job.kept if "bias" in n}
    assert moved <= allowed
    assert len(set(job.trained) - moved) <= 1, "the confidence head of a drafter never right may rest"
    if kind == "draft":
        assert all(n.startswith("mtp.") for n in moved)


class HostReads(TorchDispatchMode):
    """Collects operators that read from the device or bring constants to it: no graph can record those."""

    BANNED = ("_local_scalar", "nonzero", "lift_fresh", "repeat_interleave", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in self.BANNED):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def _narrow(device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


@pytest.mark.parametrize("kind", ["ced", "draft", "v3"])
def test_a_step_in_bf16_reads_nothing_back(
    kind: str, prepared: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU runs: near fp32, attention in bf16 throughout, nothing that a graph cannot record."""
    job = job_of(kind, prepared, tokenizer, tmp_path)
    job.draw(0.5)
    want = job.loss().detach()
    for module in (jobs, v3_job):
        monkeypatch.setattr(module, "precision", _narrow)
    kinds: set[torch.dtype] = set()

    def watched(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, shares = fast.attend(*inputs)
        kinds.update((out.dtype, shares.dtype))
        return out, shares

    for module in (ced_forward, ced_draft):
        monkeypatch.setattr(module, "attend", watched)
    with HostReads() as reads:
        got = job.loss()
        got[0].backward()
        job.settle()
    assert reads.found == []
    assert kinds <= {torch.bfloat16}
    torch.testing.assert_close(got.detach()[:2], want[:2], rtol=0.05, atol=0.02)


@pytest.mark.parametrize("kind", ["ced", "v3"])
def test_a_killed_run_goes_on(kind: str, prepared: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    plan = Plan(0.6, 1e-2, tmp_path, graph=False, steps=1)
    job = job_of(kind, prepared, tokenizer, tmp_path)
    train(job, plan)
    kept = {n: t.clone() for n, t in job.kept.items()}
    rows = list(csv.DictReader((tmp_path / "loss.csv").open()))
    assert float(rows[-1]["seconds"]) >= 0.6
    again = job_of(kind, prepared, tokenizer, tmp_path)
    train(again, dataclasses.replace(plan, resume=True))
    assert len(list(csv.DictReader((tmp_path / "loss.csv").open()))) == len(rows), "the stage was over"
    train(again, dataclasses.replace(plan, resume=True, seconds=1.2, rate=0.0))
    more = list(csv.DictReader((tmp_path / "loss.csv").open()))[len(rows) :]
    assert int(more[0]["step"]) == int(rows[-1]["step"]) + 1
    assert float(more[-1]["seconds"]) >= 1.2
    for n, t in again.trained.items():
        torch.testing.assert_close(t, kept[n], msg=lambda text, n=n: f"{n}: {text}")
    assert not list(tmp_path.glob("*.part"))


def test_the_loss_curve_forgets_what_no_checkpoint_holds(prepared: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    plan = Plan(0.3, 1e-2, tmp_path, graph=False, steps=1)
    job = job_of("v3", prepared, tokenizer, tmp_path)
    train(job, plan)
    curve = tmp_path / "loss.csv"
    whole = curve.read_text()
    curve.write_text(whole + "v3,100000,9.9,1,1.0,1.0,1.0,1.0\n")
    train(job, dataclasses.replace(plan, resume=True))
    assert curve.read_text() == whole
    train(job_of("v3", prepared, tokenizer, tmp_path), plan)
    assert [row["step"] for row in csv.DictReader(curve.open())][:2] == ["1", "2"]


def test_a_loss_that_is_no_number_stops_the_run(prepared: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    job = job_of("v3", prepared, tokenizer, tmp_path)
    next(iter(job.trained.values())).data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"v3: .* near step 2: use --resume with a smaller --rate"):
        train(job, Plan(60.0, 1e-2, tmp_path, graph=False, steps=2))
    assert not (tmp_path / "model.safetensors").exists()


def test_a_rate_follows_the_time() -> None:
    assert rate_at(0.0) == 0.0
    assert rate_at(WARM / 2) == pytest.approx(0.5)
    assert rate_at(WARM) == rate_at(HOLD) == pytest.approx(1.0)
    assert rate_at(0.65) == pytest.approx(0.5)
    assert rate_at(1.0) == rate_at(1.5) == LAST


@pytest.mark.slow
def test_the_command_trains_saves_and_measures(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full shapes for a few seconds each, twice: the second run finds everything done."""
    little = evaluate.Amount(every=60, windows=1, prompts=1, continued=8, batch=1)
    monkeypatch.setattr(train_command.evaluate, "Amount", lambda: little)
    times = ["--minutes", "0.1", "--draft-minutes", "0.1", "--v3-minutes", "0.1", "--rollouts", "1"]
    where = ["--out", str(tmp_path), "--data", str(prepared), "--device", "cpu", "--batch", "1", "--length", "256"]
    train_command.main(["ced", "v3", *times, *where])
    curves = {path: path.read_text() for path in tmp_path.rglob("*.csv")}
    assert {path.name for path in curves} == {"loss.csv", "loss_draft.csv"}
    for name in ("ced", "v3"):
        assert 0 < json.loads((tmp_path / name / "metrics.json").read_text())["bits_per_byte"] < 20
        assert (tmp_path / name / "model.safetensors").stat().st_size < 24e6
        assert str(tmp_path) not in (tmp_path / name / "commands.txt").read_text()
    train_command.main(["ced", "v3", *times, *where, "--resume"])
    assert curves == {path: path.read_text() for path in tmp_path.rglob("*.csv")}


def test_saved_ced_gives_the_same_logits(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model, raw = ced_of(tokenizer)
    ced_model.save(model, raw, tokenizer, tmp_path)
    found, same = ced_model.load(tmp_path)
    assert same.to_str() == tokenizer.to_str()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(p if name.endswith(ced_model.WIDE) else p.bfloat16())
        ids = torch.arange(120).view(3, 40)
        assert torch.equal(found(ids), model(ids))


def test_saved_v3_gives_the_same_logits_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = v3_model.build(tokenizer.get_vocab_size(), **V3)
    v3_model.save(model, tokenizer, tmp_path)
    found, _ = v3_model.load(tmp_path)
    assert type(found.main).__name__ == "DeepseekV3ForCausalLM"
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
        ids = torch.arange(120).view(3, 40)
        for got, want in zip(v3_model.both(found, ids), v3_model.both(model, ids)):
            torch.testing.assert_close(got.float(), want.float(), rtol=1e-5, atol=1e-5)


def test_published_names_of_the_extra_layer(tokenizer: Tokenizer) -> None:
    names = set(v3_model.published(v3_model.build(tokenizer.get_vocab_size(), **V3)))
    extra = {name.removeprefix("model.layers.3.") for name in names if name.startswith("model.layers.3.")}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= extra
    assert {"shared_head.head.weight", "embed_tokens.weight", "mlp.experts.7.up_proj.weight"} <= extra
    assert not [name for name in names if name.endswith(("gate_up_proj", "experts.down_proj"))]


def test_sizes_keep_the_limits(prepared: Path) -> None:
    """11 million parameters, 24 MB a file, for the shapes that are trained."""
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    model = ced_model.build(ced_model.shape(tokenizer), tokenizer)
    missing = 2 * (data.VOCABULARY - tokenizer.get_vocab_size()) * (192 + 32)
    assert ced_model.counts(model)["all"] + missing < 11e6
    narrow = sum(p.numel() * (4 if n.endswith(ced_model.WIDE) else 2) for n, p in model.named_parameters())
    assert narrow + 2 * missing < 24e6
    assert v3_model.counts(v3_model.build(data.VOCABULARY))["all"] < 11e6


def test_drafts_accepted_are_those_of_a_real_run(tokenizer: Tokenizer) -> None:
    model, _ = ced_of(tokenizer)
    prompts = torch.arange(36).view(3, 12)
    got = evaluate.drafted(model, prompts, 24)
    taken: list[int] = []
    with torch.no_grad():
        for row in prompts:
            taken += _verified(model, row.unsqueeze(0), 24)
    assert got.accepted == pytest.approx(sum(taken) / len(taken))
    assert 0 <= got.error <= 1


def _verified(model: DeepseekV41, prompt: Tensor, count: int) -> list[int]:
    """Draft, verify against the whole sequence, keep what agrees and one token more; accepted drafts of each step."""
    from deepinfer_compile.models.deepseek_v41.generate import prefill, propose

    line = torch.cat((prompt, generate(model, prompt, count)), dim=1)
    taken, at = [], prompt.shape[1]
    while at + 5 < line.shape[1]:
        _, state = prefill(model, line[:, :at], line.shape[1])
        block = propose(model, line[:, at], state).tokens[0].tolist()
        right = [a == b for a, b in zip(block, line[0, at + 1 : at + 6].tolist())]
        taken.append(right.index(False) if False in right else 5)
        at += taken[-1] + 1
    return taken
