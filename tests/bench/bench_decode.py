"""Decode and prefill of SmolLM2-135M, fp32, context 512, on this CPU: the bundle against what a user would otherwise
run.

`python -m tests.bench.bench_decode FOLDER` (the demo's folder). Each contestant runs in its own process; a rate is the
median of three runs of 32 decode steps after the prompt. Weights of the bundle are memory-mapped files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BATCHES = (1, 8)
CONTEXT, STEPS = 512, 32

OURS = """
import json, sys, time
import torch
import deepinfer_compile as dc
llm = dc.load(sys.argv[1], max_model_len=1024, max_num_batched_tokens=4096)
result = {}
def seconds(ids, count):
    params = dc.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(ids, params)
    return time.perf_counter() - begin
for batch in json.loads(sys.argv[2]):
    ids = [list(range(100 + i, 100 + i + int(sys.argv[3]))) for i in range(batch)]
    seconds(ids, 4)
    pairs = [(seconds(ids, 1), seconds(ids, 1 + int(sys.argv[4]))) for _ in range(3)]
    result[batch] = {"prefill": sorted(a for a, _ in pairs)[1],
                     "decode": sorted(batch * int(sys.argv[4]) / (b - a) for a, b in pairs)[1]}
print(json.dumps(result))
"""

PEER = """
import json, sys, time
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
compiled = sys.argv[5] == "compiled"
context, steps = int(sys.argv[3]), int(sys.argv[4])
step = torch.compile(model, dynamic=False) if compiled else model
result = {}
def run(ids):
    batch = ids.shape[0]
    if compiled:
        cache = transformers.StaticCache(config=model.config, max_cache_len=context + steps + 1)
    else:
        cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        begin = time.perf_counter()
        place = torch.arange(context)[None].expand(batch, -1)
        logits = model(ids, past_key_values=cache, use_cache=True, position_ids=place, logits_to_keep=1).logits
        token = logits[:, -1:].argmax(-1)
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        for i in range(steps):
            place = torch.full((batch, 1), context + i)
            token = step(token, past_key_values=cache, use_cache=True, position_ids=place).logits.argmax(-1)
        return first, time.perf_counter() - begin
for batch in json.loads(sys.argv[2]):
    ids = torch.stack([torch.arange(100 + i, 100 + i + context) for i in range(batch)])
    begin = time.perf_counter()
    run(ids)
    warm = time.perf_counter() - begin
    pairs = [run(ids) for _ in range(3)]
    result[batch] = {"prefill": sorted(a for a, _ in pairs)[1], "first": warm,
                     "decode": sorted(batch * steps / b for _, b in pairs)[1]}
print(json.dumps(result))
"""


def measure(code: str, folder: Path, *extra: str) -> dict[str, dict[str, float]]:
    """Run one contestant in a process of its own."""
    command = [sys.executable, "-c", code, str(folder), json.dumps(BATCHES), str(CONTEXT), str(STEPS), *extra]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr[-3000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(folder: Path) -> None:
    """Print the table."""
    import deepinfer_compile

    model, bundle = folder / "SmolLM2-135M-Instruct", folder / "smollm2.bundle"
    if not model.exists():
        from deepinfer_compile.cli.demo import convert

        convert(model)
    deepinfer_compile.build(model, bundle)
    rows = {
        "this bundle": measure(OURS, bundle),
        "Transformers eager": measure(PEER, model, "eager"),
        "Transformers static cache + torch.compile": measure(PEER, model, "compiled"),
    }
    print(f"SmolLM2-135M fp32, context {CONTEXT}")
    print("| | " + " | ".join(f"decode tokens/s, batch {b} | prefill s, batch {b}" for b in BATCHES) + " |")
    print("|---" * (1 + 2 * len(BATCHES)) + "|")
    for name, row in rows.items():
        cells = [f"{row[str(b)]['decode']:.1f} | {row[str(b)]['prefill']:.2f}" for b in BATCHES]
        print(f"| {name} | " + " | ".join(cells) + " |")
    for b in BATCHES:
        best = max(rows[n][str(b)]["decode"] for n in rows if n != "this bundle")
        fastest = min(rows[n][str(b)]["prefill"] for n in rows if n != "this bundle")
        ours = rows["this bundle"][str(b)]
        print(
            f"batch {b}: decode {ours['decode'] / best:.2f}x the better peer, prefill {fastest / ours['prefill']:.2f}x"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
