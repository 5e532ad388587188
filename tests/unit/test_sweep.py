"""The sweep: right before fast, every configuration once, nothing lost but what was in flight (TUNE-1, TUNE-2)."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_compile import render
from deepinfer_compile.errors import BadShapes, CannotMeasure, OutputBusy, SweepFailed
from deepinfer_compile.kernels import fields_of
from deepinfer_compile.sweep import Sweep
from deepinfer_compile.sweep_machine import this_machine, until_clear
from deepinfer_compile.sweep_pool import CompilePool
from deepinfer_compile.tuning import Store
from tests.bundle.killing import in_child
from tests.sweeping import FakeMachine, FakeTimer, filled, shape, spec_of

LINEAR, NORM, LATENT = spec_of("linear"), spec_of("rms_norm"), spec_of("cached_latent_attention")
SMALL = LINEAR.params(terms=20, lines=6, dtype=torch.float32, biased=True, align=4)
ROWS = NORM.cases[0].params


def by_size(config: Any) -> float:
    """The larger, the faster."""
    return 1000.0 / sum(v for v in vars(config).values())


def swept(machine: FakeMachine, folder: Path, *shapes: Any, us: Any = by_size, **options: Any) -> Any:
    timer = FakeTimer(us)
    sweep = Sweep(machine, timer, Store(folder), **options)
    return list(sweep.run(shapes)), timer


def test_every_legal_configuration_is_measured_once_the_default_first(tmp_path: Path) -> None:
    machine = FakeMachine()
    (found,), timer = swept(machine, tmp_path, shape(LINEAR, SMALL, 3))
    legal = set(LINEAR.space(SMALL, machine.limits))
    assert set(timer.timed) == legal
    assert len(timer.timed) == len(legal) == len(found.bucket.measurements)
    assert timer.timed[0] == LINEAR.default(SMALL, machine.limits, 3)
    best = min(legal, key=by_size)
    assert found.bucket.best.config == vars(best)
    assert found.bucket.best.us == by_size(best)
    assert found.bucket.default_us == by_size(timer.timed[0])
    assert found.bucket.counts() == {"legal": len(legal), "rejected": 0, "measured": len(legal)}
    again = Store(tmp_path).read(found.key)
    assert again.buckets == (found.bucket,)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("wrong", "'out' is 1.0e-02 of its largest value off, more than 5.0e-06"),
        ("partial", "'out' is nan of its largest value off"),
        ("racy", "two runs differ"),
        ("raises", "ValueError: this one"),
        ("compile", "the compiler says no"),
        ("spills", "it spills 999 words a thread"),
    ],
)
def test_what_is_wrong_never_wins(tmp_path: Path, fault: str, reason: str) -> None:
    """The fastest configurations are the faulty ones."""
    machine = FakeMachine(lambda c: fault if c.num_warps == 8 else "")
    (found,), timer = swept(machine, tmp_path, shape(LINEAR, SMALL, 3))
    bad = [m for m in found.bucket.measurements if m.config["num_warps"] == 8]
    assert bad
    assert all(m.us is None and reason in m.rejected for m in bad)
    assert found.bucket.best.config["num_warps"] == 4
    if fault != "racy":
        assert all(c.num_warps != 8 for c in timer.timed)
    assert found.bucket.counts()["rejected"] == len(bad)


def test_what_is_written_is_compared_too_and_made_afresh(tmp_path: Path) -> None:
    params = next(c.params for c in LATENT.cases if c.name == "block")
    few = replace(LATENT, space=_some)
    machine = FakeMachine(lambda c: "writes" if c.pieces == 2 else "")
    (found,), _ = swept(machine, tmp_path, shape(few, params, 3, 70))
    reasons = {m.config["pieces"]: m.rejected for m in found.bucket.measurements}
    assert "what it writes to 'latent' differs" in reasons[2]
    assert reasons[1] == reasons[4] == ""


def _some(params: Any, limits: Any) -> Any:
    """One configuration for each number of pieces."""
    return {c.pieces: c for c in LATENT.space(params, limits)}.values()


def test_nothing_right_is_an_error_and_is_not_stored(tmp_path: Path) -> None:
    with pytest.raises(SweepFailed, match=r"no configuration of 27 passed; the default: 'out' is"):
        swept(FakeMachine(lambda c: "wrong"), tmp_path, shape(NORM, NORM.cases[2].params, 4))
    assert not list(tmp_path.iterdir())


def test_a_lost_device_ends_the_sweep_and_is_passed_over_afterwards(tmp_path: Path) -> None:
    machine = FakeMachine(lambda c: "lost" if (c.block_k, c.num_stages) == (32, 3) and c.num_warps == 2 else "")
    faulty = [c for c in LINEAR.space(SMALL, machine.limits) if machine.fault(c)]
    assert faulty
    for _ in faulty:
        machine.lost = False
        with pytest.raises(SweepFailed, match=r"the device is lost\n  try: run it again"):
            swept(machine, tmp_path, shape(LINEAR, SMALL, 1))
    machine.lost = False
    (found,), _ = swept(machine, tmp_path, shape(LINEAR, SMALL, 1))
    assert found.bucket.counts()["rejected"] == len(faulty)
    assert len(machine.seen) == len(set(machine.seen))


def test_one_token_may_lie_better_than_the_kernel_needs(tmp_path: Path) -> None:
    experts = spec_of("experts")
    case = next(c for c in experts.cases if c.name == "padding")
    params = replace(case.params, hidden=32, width=16, align=8)
    (found,), _ = swept(FakeMachine(), tmp_path, shape(experts, params, 1), us=lambda c: 1.0)
    assert found.bucket.counts()["rejected"] == 0


def test_what_is_stored_is_not_measured_again(tmp_path: Path) -> None:
    one, two = shape(NORM, ROWS, 1), shape(NORM, ROWS, 8)
    swept(FakeMachine(), tmp_path, one)
    (first, second), timer = swept(FakeMachine(), tmp_path, one, two)
    assert (first.stored, second.stored) == (True, False)
    assert len(timer.timed) == second.bucket.counts()["legal"]
    (again, _), timer = swept(FakeMachine(), tmp_path, one, two, us=lambda c: 7.0 * c.rows, again=True)
    assert not again.stored
    assert len(timer.timed) == first.bucket.counts()["legal"] + second.bucket.counts()["legal"]
    assert again.bucket.default_us == 7.0
    assert [b.tokens for b in Store(tmp_path).read(again.key).buckets] == [1, 8]
    with pytest.raises(BadShapes, match="--again"):
        swept(FakeMachine(), tmp_path, shape(NORM, ROWS, 8, context=9))


@pytest.mark.parametrize("at", [1, 2, 13, 40])
def test_kill_9_loses_the_configuration_in_flight(tmp_path: Path, at: int) -> None:
    log = tmp_path / "log"
    count = len(set(LINEAR.space(SMALL, FakeMachine().limits)))

    def timed(config: Any) -> float:
        with log.open("a") as file:
            file.write(f"{vars(config)}\n")
        if len(log.read_text().splitlines()) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return by_size(config)

    _, status = os.waitpid(in_child(lambda: swept(FakeMachine(), tmp_path / "s", shape(LINEAR, SMALL, 3), us=timed)), 0)
    assert os.WIFSIGNALED(status)
    assert not list((tmp_path / "s").glob("*.json"))
    (found,), _ = swept(FakeMachine(), tmp_path / "s", shape(LINEAR, SMALL, 3), us=timed)
    assert found.resumed == at - 1
    lines = log.read_text().splitlines()
    assert len(lines) == count + 1
    assert len(set(lines)) == count
    assert lines.count(lines[at - 1]) == 2
    assert [p.name for p in (tmp_path / "s").iterdir()] == [f"{found.key.name()}.json"]
    whole, _ = swept(FakeMachine(), tmp_path / "t", shape(LINEAR, SMALL, 3))
    assert whole[0].bucket == found.bucket


def test_two_sweeps_of_one_record_do_not_meet(tmp_path: Path) -> None:
    sweep = Sweep(FakeMachine(), FakeTimer(by_size), Store(tmp_path))
    running = sweep.run([shape(NORM, ROWS, 1), shape(NORM, ROWS, 2)])
    next(running)
    with pytest.raises(OutputBusy):
        swept(FakeMachine(), tmp_path, shape(NORM, ROWS, 2))
    running.close()
    swept(FakeMachine(), tmp_path, shape(NORM, ROWS, 2))


def test_a_record_of_another_template_is_named_and_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("deepinfer_compile.tuning.render.digest", lambda template: "0" * 16)
        filled(tmp_path, [shape(NORM, ROWS, 1)], by_size)
    sweep = Sweep(FakeMachine(), FakeTimer(by_size), Store(tmp_path))
    (found,) = sweep.run([shape(NORM, ROWS, 1)])
    assert not found.stored
    assert len(list(tmp_path.glob("*.json"))) == 2
    (note,) = sweep.notes
    assert "made from another version of the kernel rms_norm" in note


def test_hopeless_configurations_are_timed_a_few_times() -> None:
    assert until_clear(iter([9.0] * 20).__next__, 15, 3, 2.0).samples == 3
    assert until_clear(iter([9.0, 1.0, *[9.0] * 20]).__next__, 15, 3, 2.0).samples == 15
    assert until_clear(iter([5.0, 1.0, 2.0]).__next__, 3, 1, 100.0).us == 2.0


def test_without_a_gpu_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CannotMeasure, match=r"no GPU that torch can use\n.*TRITON_INTERPRET=1"):
        this_machine()


WORKER = """
import json, os, sys, time
for line in sys.stdin:
    what = json.loads(line)["do"]
    if what == "die":
        print("ptxas: aborted", file=sys.stderr)
        os.abort()
    if what == "hang":
        time.sleep(60)
    print(json.dumps({"reason": what}), flush=True)
"""


def test_a_compiler_that_dies_or_hangs_costs_its_own_job() -> None:
    pool = CompilePool(2, 1.0, (sys.executable, "-c", WORKER))
    try:
        jobs = [{"do": what} for what in ("", "die", "no", "hang", "", "die", "")]
        found = pool.reasons(jobs)
    finally:
        pool.close()
    died = "the compiler's process ended with code -6: ptxas: aborted"
    assert found == ["", died, "no", "compiling took more than 1 s", "", died, ""]


def test_the_worker_answers_with_the_reason(tmp_path: Path) -> None:
    pool = CompilePool(1)
    params = render.encode_values("linear", fields_of(SMALL))
    config = {"block_t": 16, "block_n": 16, "block_k": 32, "split": 1, "num_warps": 4, "num_stages": 1}
    operands = {"x": [[1, 20], [20, 1], "float32"], "weight": [[6, 20], [20, 1], "float32"]}
    operands["bias"] = [[6], [1], "float32"]
    job = {"kernel": "linear", "op": "linear", "params": params, "config": config, "operands": operands}
    try:
        (reason,) = pool.reasons([job])
    finally:
        pool.close()
    assert "driver" in reason or "CUDA" in reason or reason == ""
