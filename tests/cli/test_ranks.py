"""`build --ranks` and `run` by torchrun: prompts are shared, every process prints its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import models
from tests.cli.conftest import Run, Toy, document, save


def test_slots_without_ranks_are_refused(cli: Run, plain: Toy, tmp_path: Path) -> None:
    result = cli("build", plain.folder, "-o", tmp_path / "o", "--graph-only", "--slots", 4)
    assert result.exit_code == 2
    assert "--ranks" in result.stderr
    for wrong, words in (
        (("--decode-ranks", 2), "--ranks"),
        (("--ranks", 2, "--decode-slots", 4), "--decode-ranks"),
    ):
        result = cli("build", plain.folder, "-o", tmp_path / "o", "--graph-only", *wrong)
        assert result.exit_code == 2
        assert f"add {words}" in result.stderr
    result = cli("build", plain.folder, "-o", tmp_path / "o", "--graph-only", "--ranks", 2)
    assert result.exit_code == 2
    assert "the model has no experts" in result.stderr


GIVEN = [[5, 6, 7], [9], [30, 31, 32, 33]]


def torchrun(processes: int, folder: Path, toy: Toy, *options: str) -> subprocess.CompletedProcess[str]:
    """Complete the prompts with so many processes."""
    (folder / "p.jsonl").write_text("".join(f"{json.dumps(ids)}\n" for ids in GIVEN))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    run = ["-m", "deepinfer_compile.cli", "run", str(toy.bundle), "--graph-only", "--file", str(folder / "p.jsonl")]
    return subprocess.run(
        [*command, *run, "--max-tokens", "6", "--ignore-eos", *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )


def check(printed: str, toy: Toy) -> None:
    """Every prompt was completed."""
    lines = printed.splitlines()
    for i, ids in enumerate(GIVEN):
        at = lines.index(f"--- prompt {i}, completion 0")
        assert lines[at + 1] == ",".join(map(str, toy.greedy(ids, 6)))


@pytest.mark.slow
def test_processes_share_the_prompts(cli: Run, tmp_path: Path) -> None:
    model = models.make("mixtral", num_hidden_layers=1)
    save(model, tmp_path / "model", tokenizer=False)
    toy = Toy(model, tmp_path / "model", tmp_path / "b")
    built = cli("build", toy.folder, "-o", toy.bundle, "--graph-only", "--ranks", 2, "--slots", 6)
    assert built.exit_code == 0, built.stderr
    assert "experts: 5 in 6 slots of 1 layer over 2 ranks" in built.stdout
    assert "torchrun --nproc-per-node 2" in built.stdout
    assert document(cli("inspect", toy.bundle, "--json"))["experts"]["room"] == 3
    assert "5 in 6 slots of 1 layer over 2 ranks, at most 3 of a layer" in cli("inspect", toy.bundle).stdout
    alone = cli("run", toy.bundle, "--graph-only", "--ids", "1,2")
    assert alone.exit_code == 8
    assert "torchrun --nproc-per-node 2" in alone.stderr

    done = torchrun(2, tmp_path, toy, "--rebalance", "3")
    assert done.returncode == 0, done.stderr[-3000:]
    check(done.stdout, toy)
    assert all(f"rank {rank}: loaded in" in done.stderr for rank in range(2))
    assert done.stderr.count("; experts: ") == 2


@pytest.mark.slow
def test_some_processes_read_the_prompts_and_others_decode(cli: Run, tmp_path: Path) -> None:
    model = models.make("mixtral", num_hidden_layers=1)
    save(model, tmp_path / "model", tokenizer=False)
    toy = Toy(model, tmp_path / "model", tmp_path / "b")
    plan = ("--ranks", 2, "--slots", 6, "--decode-ranks", 1, "--decode-slots", 5)
    built = cli("build", toy.folder, "-o", toy.bundle, "--graph-only", *plan)
    assert built.exit_code == 0, built.stderr
    words = "to read prompts 5 in 6 slots of 1 layer over 2 ranks, at most 3 of a layer on each; to decode 5 in 5 slots"
    assert words in built.stdout
    assert "torchrun --nproc-per-node 3" in built.stdout
    assert words in cli("inspect", toy.bundle).stdout
    assert document(cli("inspect", toy.bundle, "--json"))["experts"]["decode"]["room"] == 5
    done = torchrun(3, tmp_path, toy)
    assert done.returncode == 0, done.stderr[-3000:]
    check(done.stdout, toy)
    for who, tokens in (("prefill rank 0", 12), ("prefill rank 1", 6), ("decode rank 0", 0)):
        said = next(line for line in done.stderr.splitlines() if line.startswith(who))
        assert f"; {tokens} tokens in" in said
    assert done.stderr.replace("\n", " ").count("of cache rows handed over") == 2


@pytest.mark.slow
def test_a_queue_goes_on_after_a_process_was_killed(cli: Run, tmp_path: Path) -> None:
    """torchrun tells the other to end; before it does it says which rank is gone. Started again they do the rest."""
    model = models.make("mixtral", num_hidden_layers=1)
    save(model, tmp_path / "model", tokenizer=False)
    toy = Toy(model, tmp_path / "model", tmp_path / "b")
    built = cli("build", toy.folder, "-o", toy.bundle, "--graph-only", "--ranks", 2, "--slots", 6)
    assert built.exit_code == 0, built.stderr
    prompts = {f"q{i}": [5 + i, 6, 7] for i in range(40)}
    (tmp_path / "q").write_text("".join(f"{json.dumps({'custom_id': i, 'prompt': p})}\n" for i, p in prompts.items()))
    files = ("--queue", str(tmp_path / "q"), "--results", str(tmp_path / "r"), "--max-tokens", "30", "--ignore-eos")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "deepinfer_compile.cli", "run", str(toy.bundle), "--graph-only", *files]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    while not all(path.exists() and path.stat().st_size for path in (tmp_path / "r.0.part", tmp_path / "r.1.part")):
        assert process.poll() is None
        time.sleep(0.01)
    (lost,) = [pid for pid in children(process.pid) if "RANK=1" in Path(f"/proc/{pid}/environ").read_text().split("\0")]
    os.kill(lost, signal.SIGKILL)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 1
    said = r"rank 1 of 2 is gone \(no sign of life for \d+ s\); rank 0 of 2 cannot go on"
    assert len(re.findall(said, err)) == 1, err[-3000:]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("40 requests, 0 of them done before") == 0
    found = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert [f["custom_id"] for f in found] == list(prompts)
    assert [f["outputs"][0]["token_ids"] for f in found] == [toy.greedy(ids, 30) for ids in prompts.values()]


def children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
