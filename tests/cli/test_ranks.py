"""`build --ranks` and `run` by torchrun: prompts are shared, every process prints its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import models
from tests.cli.conftest import Run, Toy, document, save


def test_slots_without_ranks_are_refused(cli: Run, plain: Toy, tmp_path: Path) -> None:
    result = cli("build", plain.folder, "-o", tmp_path / "o", "--graph-only", "--slots", 4)
    assert result.exit_code == 2
    assert "--ranks" in result.stderr
    result = cli("build", plain.folder, "-o", tmp_path / "o", "--graph-only", "--ranks", 2)
    assert result.exit_code == 2
    assert "the model has no experts" in result.stderr


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

    given = [[5, 6, 7], [9], [30, 31, 32, 33]]
    (tmp_path / "p.jsonl").write_text("".join(f"{json.dumps(ids)}\n" for ids in given))
    run = [
        *("-m", "deepinfer_compile.cli", "run", str(toy.bundle), "--graph-only"),
        "--file",
        str(tmp_path / "p.jsonl"),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *run]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--max-tokens", "6", "--ignore-eos", "--rebalance", "3"],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    for i, ids in enumerate(given):
        at = lines.index(f"--- prompt {i}, completion 0")
        assert lines[at + 1] == ",".join(map(str, toy.greedy(ids, 6)))
    assert all(f"rank {rank}: loaded in" in done.stderr for rank in range(2))
    assert done.stderr.count("; experts: ") == 2
