"""Full-size configurations on the meta device: capture and passes are flat in layers and experts, and small in
memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from deepinfer_compile.capture import capture
from deepinfer_compile.presets import default
from deepinfer_compile.replay import logits_of, weights_from
from tests import models

SCRIPT = """
import gc, json, sys, time
import torch
torch.set_num_threads(1)
import transformers as T
from deepinfer_compile.capture import capture
from deepinfer_compile.capture.source import concrete_buffers, meta_model
from deepinfer_compile.phases import phase_programs
from deepinfer_compile.presets import default
from deepinfer_compile.programjson import program_to_json
cls, options, short = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "short"
if short:
    options["num_hidden_layers"] = 4
# what Python and torch load once is not the model's cost
tiny = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
capture(T.AutoModelForCausalLM.from_config(T.LlamaConfig(**tiny)))
model = meta_model(getattr(T, cls)(**options), torch.bfloat16)
concrete_buffers(model)
times = []
for _ in range(4):
    gc.collect()
    begin = time.process_time()
    program = capture(model)
    captured = time.process_time()
    times.append(captured - begin)
packed, _ = default().run(program)
programs, _ = phase_programs(packed, {})
size = sum(len(json.dumps(program_to_json(p))) for p in programs.values())
done = time.process_time()
# not ru_maxrss, which begins with what the process that started this one held
peak = next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"capture": min(times), "all": done - begin, "bytes": size,
                  "mib": peak, "layers": len(packed.caches)}))
"""
FULL: dict[str, tuple[str, int, dict[str, Any]]] = {
    "DeepSeek-V3": ("DeepseekV3Config", 61, {}),
    "Qwen3-235B": (
        "Qwen3MoeConfig",
        94,
        {
            "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
            "head_dim": 128, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
            "vocab_size": 151936, "norm_topk_prob": True,
        },
    ),
    "GPT-OSS-120B": ("GptOssConfig", 36, {"num_hidden_layers": 36, "num_local_experts": 128}),
}  # fmt: skip


def measure(cls: str, options: dict[str, Any], short: bool) -> dict[str, float]:
    command = [sys.executable, "-c", SCRIPT, cls, json.dumps(options), "short" if short else "full"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_build_time_is_flat(name: str) -> None:
    cls, layers, options = FULL[name]
    full, short = measure(cls, options, False), measure(cls, options, True)
    print(name, full, short)
    assert full["layers"] == layers
    assert full["capture"] < 10
    # a trace costs the same; every layer is run once on the meta device, and has its line in programs
    assert full["capture"] - short["capture"] < 0.008 * layers
    assert full["all"] - short["all"] < 0.03 * layers
    assert full["capture"] < 2 * short["capture"]
    assert full["mib"] < 1536
    assert full["all"] < 60
    assert full["all"] < 3 * short["all"]


def test_a_deep_narrow_model_equals_eager() -> None:
    model = models.make(
        "deepseek_v3", num_hidden_layers=61, hidden_size=32, intermediate_size=40, first_k_dense_replace=3
    )
    program, _ = default().run(capture(model))
    assert len(program.caches) == 61
    assert len(program.calls()) == 63
    ids = torch.randint(3, models.VOCAB, (19,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids]), use_cache=False).logits[0, [0, 18]]
    got = logits_of(program, weights_from(model), ids, [0, 18], chunk=7)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
