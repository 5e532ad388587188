"""Ranks that lose one of them, and calls that ranks cannot make."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deepinfer_compile as dc
from deepinfer_compile.errors import BadOption, BadRequest, RankLost, WrongTarget
from deepinfer_compile.runtime.ranks import IDLE, Ranks, join
from deepinfer_compile.runtime.stored import Malformed, _check_spread
from deepinfer_compile.settings import ExpertPlan
from tests.e2e.parity import prompts
from tests.plain_model import VOCAB, PlainDecoder, make_plain
from tests.ranks import ended, start


def small() -> PlainDecoder:
    return make_plain("loop", layers=1)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dc.build(small(), tmp_path_factory.mktemp("b") / "b", native=False, experts=ExpertPlan(ranks=2)).root


def job(bundle: Path, **more: Any) -> dict[str, Any]:
    return {"bundle": str(bundle), "prompts": [prompts(VOCAB, (20,))] * 2, "count": 100, **more}


def test_when_a_rank_ends_the_other_says_so(bundle: Path, tmp_path: Path) -> None:
    """Long before the hour that it would wait for one that is slow."""
    (code, err), (other, _) = ended(start(2, tmp_path / "run", [job(bundle, die=1)], patience=3600.0), 60.0)
    assert other == 9
    assert code == 1
    lost = r"RankLost: rank 1 of 2 is gone \(no sign of life for \d+ s\); rank 0 of 2 cannot go on"
    assert len(re.findall(lost, err)) == 1, err[-3000:]


@pytest.mark.slow
def test_when_a_step_fails_no_rank_goes_on(bundle: Path, tmp_path: Path) -> None:
    """The rank where it failed says why; it takes part in nothing more, so that the other's rows meet nothing else."""
    (code, err), (other, why) = ended(start(2, tmp_path / "run", [job(bundle, fail=1)]), 60.0)
    assert (code, other) == (1, 1)
    assert why.rstrip().endswith("ValueError: a step that fails"), why[-3000:]
    lost = "RankLost: rank 1 of 2 has stopped (ValueError: a step that fails); rank 0 of 2 cannot go on"
    assert err.count(lost) == 1, err[-3000:]


@pytest.mark.slow
def test_ranks_with_different_placements_are_refused(bundle: Path, tmp_path: Path) -> None:
    plans = [[[0, 1, 2, 3, 4, 0]], [[0, 1, 2, 3, 4, 1]]]
    for code, err in ended(start(2, tmp_path / "run", [job(bundle, placements=plans)]), 60.0):
        assert code == 1
        assert "the ranks load different things" in err


@pytest.mark.slow
def test_a_rank_that_does_not_answer(bundle: Path, tmp_path: Path) -> None:
    """It gives no sign of life; the other does not wait the hour that it was told to, and the end of its group neither.
    When it goes on it learns that it was taken for lost."""
    first, second = start(2, tmp_path / "run", [job(bundle, stop=1)], patience=3600.0)
    code, err = ended([first], 60.0)[0]
    second.send_signal(signal.SIGCONT)
    (other, own) = ended([second], 60.0)[0]
    assert (code, other) == (1, 1)
    lost = r"RankLost: rank 1 of 2 is gone \(no sign of life for 1\d s\); rank 0 of 2 cannot go on"
    assert len(re.findall(lost, err)) == 1, err[-3000:]
    assert "RankLost: the others have taken this rank for lost" in own, own[-3000:]


def test_one_rank_is_alone(tmp_path: Path) -> None:
    """It needs no process group, and every placement is the same one."""
    model = small()
    dc.build(model, tmp_path / "b", native=False, experts=ExpertPlan(ranks=1))
    llm = dc.load(tmp_path / "b", native=False, max_num_batched_tokens=96)
    given = prompts(VOCAB, (9, 3))
    params = dc.SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    found = [list(o.outputs[0].token_ids) for o in llm.generate(given, params)]
    for prompt, tokens in zip(given, found, strict=True):
        with torch.no_grad():
            for i, token in enumerate(tokens):
                assert int(model(torch.tensor([prompt + tokens[:i]]))[0, -1].argmax()) == token
    with pytest.raises(BadRequest, match="not exchanged in place"):
        llm.reload(tmp_path)
    stream = llm.stream(given, params)
    with pytest.raises(BadRequest, match="one call at a time"):
        llm.generate(given, params)
    stream.close()
    with pytest.raises(BadRequest, match="empty"):
        llm.generate([[]], params)
    with pytest.raises(BadRequest, match="empty"):
        llm.stream([[]], params)
    llm.place(np.array([[3, 0, 4, 1, 2]]))
    assert [list(o.outputs[0].token_ids) for o in llm.generate(given, params)] == found
    with pytest.raises(BadOption, match="expert 0 has no slot"):
        llm.place(np.array([[3, 1, 4, 1, 2]]))
    llm.place(np.array([[4, 3, 2, 1, 0]]))
    assert [list(o.outputs[0].token_ids) for o in llm.generate(given, params)] == found
    w13 = next(n for n in llm.parts if n.endswith("w13"))
    assert torch.equal(llm.weights[w13], llm.files.weights()[w13].flip(0))
    llm.parts["no such tensor"] = 0
    with pytest.raises(KeyError):
        llm.place(np.array([[0, 1, 2, 3, 4]]))
    with pytest.raises(RankLost, match="placing experts of this rank ended early"):
        llm.generate(given, params)
    for wrong in (np.zeros((1, 4)), np.array([[0, 1, 2, 3, 3]])):
        with pytest.raises(BadOption, match="placement"):
            dc.load(tmp_path / "b", native=False, placement=wrong)


def test_a_process_alone_is_not_two_ranks(bundle: Path) -> None:
    with pytest.raises(WrongTarget, match="nproc-per-node 2"):
        dc.load(bundle, native=False)
    with pytest.raises(WrongTarget, match="build for 1"):
        join(None, 3)
    alone = Ranks()
    assert alone.agree(IDLE, 0) == (IDLE, 0)
    assert alone.agree("verify", 7) == ("verify", 7)


PLAN = {"ranks": 2, "slots": 5, "room": 3, "experts": 5, "layers": 2, "chosen": 2}


@pytest.mark.parametrize(
    ("plan", "experts", "shape"),
    [
        ({}, [0, 5], [3, 4]),
        (PLAN, [2, 5], [3, 4]),
        (PLAN, [0, 6], [3, 4]),
        (PLAN, [0, 5], [4, 4]),
        (PLAN, [0, 5], []),
        (PLAN, [1, 5], [3, 4]),
    ],
)
def test_programs_must_fit_the_plan(plan: dict[str, int], experts: list[int], shape: list[int]) -> None:
    """No plan, a layer or experts that it has not, slots of another number, another layer in another program."""
    program = {"weights": {"w": {"tensor": "t", "experts": experts, "shape": shape}, "other": {"tensor": "u"}}}
    with pytest.raises(Malformed, match="weight 'w'"):
        _check_spread(program, plan, {"t": [0, 5]})
    _check_spread({"weights": {"w": {"tensor": "t", "experts": [0, 5], "shape": [3]}}}, PLAN, {"t": [0, 5]})
