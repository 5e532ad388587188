"""Trains the two small models: `python -m tests.trained.train ced v3`, after `python -m tests.trained.data`.

On one GPU with at least 40 GB the defaults take nine minutes for both. `--minutes` are those of the V4.1-form model,
`--draft-minutes` of its drafter, `--v3-minutes` of the V3-form model; rollouts and evaluation come on top. A run that
was cut short goes on with `--resume` and the same numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tests.trained import ced_draft, ced_model, data, evaluate
from tests.trained.jobs import CedJob, Crops, DraftJob
from tests.trained.loop import Plan, train

PROMPT = 128
ROLLOUT = 512


def train_ced(options: argparse.Namespace, folder: Path) -> None:
    """The model, then the drafter on the model as it is then."""
    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    raw = ced_model.shape(tokenizer)
    model = ced_model.build(raw, tokenizer)
    ced_model.start(model, options.seed)
    model.to(options.device)
    print(ced_model.counts(model), flush=True)
    saved = (model, raw, tokenizer, folder)
    crops = Crops(data.load("train", options.data).line, model.token_map.device, options.seed)
    plan = _plan(options, folder, options.minutes)
    job = CedJob(*saved, crops=crops, batch=options.batch, length=options.length)
    train(job, plan)
    del job
    train_draft(options, plan, saved, crops)


def train_draft(options: argparse.Namespace, plan: Plan, saved: tuple, crops: Crops) -> None:
    """Continues texts greedily, known ones to draft on and new ones to judge by, then trains the drafter."""
    model = saved[0]
    device = model.token_map.device
    new = Crops(data.load("tune", options.data).line, device, options.seed)
    began = time.monotonic()
    prompts = torch.cat([source.draw(options.rollouts, PROMPT) for source in (crops, new)])
    continued = ced_draft.rollouts(model, prompts, min(ROLLOUT, options.length))
    print(f"rollouts: {continued.numel()} tokens in {time.monotonic() - began:.1f} s", flush=True)
    known, fresh = continued.chunk(2)
    job = DraftJob(*saved, crops=crops, known=known, new=fresh, batch=2 * options.batch, prompt=PROMPT)
    train(job, replace(plan, seconds=60 * options.draft_minutes))


def train_v3(options: argparse.Namespace, folder: Path) -> None:
    """The V3-form model with its extra layer."""
    from tests.trained import v3_model
    from tests.trained.v3_job import V3Job

    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    model = v3_model.build(tokenizer.get_vocab_size())
    v3_model.start(model, options.seed)
    model.to(options.device)
    print(v3_model.counts(model), flush=True)
    crops = Crops(data.load("train", options.data).line, torch.device(options.device), options.seed)
    job = V3Job(model, tokenizer, folder, crops, options.batch, options.length)
    train(job, _plan(options, folder, options.v3_minutes))


def _plan(options: argparse.Namespace, folder: Path, minutes: float) -> Plan:
    graph = options.device.startswith("cuda") and not options.eager
    return Plan(60 * minutes, options.rate, folder, graph=graph, resume=options.resume)


def _note(folder: Path, options: argparse.Namespace) -> None:
    """commands.txt: what was run, with what, on what."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = ("minutes", "draft_minutes", "v3_minutes", "rate", "batch", "length", "rollouts", "seed")
    said = " ".join(f"--{flag.replace('_', '-')} {getattr(options, flag)}" for flag in flags)
    on = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    lines = (
        "python -m tests.trained.data",
        f"python -m tests.trained.train {folder.name} {said}{' --eager' if options.eager else ''}",
        f"# Python {sys.version.split()[0]}, torch {torch.__version__}, {on}",
    )
    (folder / "commands.txt").write_text("\n".join(lines) + "\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=("ced", "v3"))
    parser.add_argument("--minutes", type=float, default=3.2)
    parser.add_argument("--draft-minutes", type=float, default=1.2)
    parser.add_argument("--v3-minutes", type=float, default=2.4)
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=ced_model.LENGTH)
    parser.add_argument("--rollouts", type=int, default=1024, help="continuations of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=data.HERE)
    parser.add_argument("--data", type=Path, default=data.PREPARED)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="launch kernels one by one instead of recording a graph")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-metrics", action="store_true", help="skip the evaluation at the end")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.manual_seed(options.seed)
    for name in options.models:
        folder = options.out / name
        _note(folder, options)
        (train_ced if name == "ced" else train_v3)(options, folder)
        if options.device.startswith("cuda"):
            print(f"{name}: peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
            torch.cuda.empty_cache()
        if not options.no_metrics:
            held = data.load("held", options.data)
            metrics = evaluate.measure(name, folder, evaluate.Amount(), held, torch.device(options.device))
            (folder / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
            print(json.dumps(metrics, indent=1), flush=True)


if __name__ == "__main__":
    main()
