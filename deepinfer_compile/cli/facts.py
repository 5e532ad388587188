"""What a bundle says about itself, as plain data: the basis of `inspect`, of `diff` and of the build summary."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from jinja2 import TemplateNotFound

from deepinfer_compile import render
from deepinfer_compile.bundle import LEDGER, BundleFiles, torch_dtype
from deepinfer_compile.bundle.manifest import MANIFEST
from deepinfer_compile.errors import BundleCorrupt, CompileError
from deepinfer_compile.kernels import AnySpec, Case, specs
from deepinfer_compile.runtime.batch import PAGE_SIZE, CacheGroup
from deepinfer_compile.runtime.cuda_graphs import LADDER
from deepinfer_compile.runtime.kernel_blocks import LIBRARY
from deepinfer_compile.runtime.pages import demand, pages_for
from deepinfer_compile.runtime.stored import Malformed, Stored, items, number, read_programs, record, table, text, whole
from deepinfer_compile.targets import get_target

CONTEXT = 4096
"""Tokens of context of a request for which the work of a kernel is shown."""
MANY, MOST = 8192, LADDER[-1]
"""Tokens of a prompt, and requests, for which the work of a kernel without a limit is shown."""
WHOLE_STEP = 2048
"""New tokens of one step, for what a window layer must hold: the loader's default."""


def describe_bundle(files: BundleFiles) -> dict[str, Any]:
    """Everything in a bundle that a person may ask for. Sizes in bytes. Raises BundleCorrupt."""
    manifest = files.manifest
    stored = read_programs(files)
    caches = describe_caches(next(iter(stored.programs.values())), manifest.caches)
    limit = int(manifest.model["max_model_len"])
    return {
        "path": str(files.root),
        "bytes": sum(entry.size for entry in manifest.files.values()),
        "model": manifest.model,
        "programs": [_program(stored, name, data) for name, data in stored.programs.items()],
        "experts": manifest.experts,
        "caches": caches,
        "cache_bytes_per_token": sum(c["bytes_per_token"] * len(c["layers"]) for c in caches),
        "cache_bytes_per_request": sum(_request_bytes(c, limit) for c in caches),
        "variants": manifest.variants,
        "kernels": describe_kernels(files, stored.programs),
        "context": CONTEXT,
        "passes": [
            {"program": k, **record} for k, records in manifest.build.get("passes", {}).items() for record in records
        ],
        "waivers": list(manifest.waivers),
        "weights": _weights(files),
        "tokenizer": {"present": bool(manifest.tokenizer), "chat": bool(manifest.tokenizer.get("chat_template"))},
        "build": {k: v for k, v in manifest.build.items() if k != "passes"},
        "files": {name: entry.size for name, entry in sorted(manifest.files.items())},
    }


def _program(stored: Stored, name: str, data: dict[str, Any]) -> dict[str, Any]:
    layers: dict[str, list[int]] = {block: [] for block in data["blocks"]}
    calls: Counter[str] = Counter()
    for node in data["skeleton"]["nodes"]:
        if node["op"] != "block":
            continue
        calls[node["target"]] += 1
        if node.get("layer") is not None:
            layers[node["target"]].append(int(node["layer"]))
    blocks = []
    for block, digest in data["blocks"].items():
        nodes = stored.graphs[digest]["nodes"]
        entry = {"name": block, "hash": digest, "layers": layers[block], "calls": calls[block], "nodes": len(nodes)}
        blocks.append({**entry, "operations": operations(nodes)})
    return {"name": name, "blocks": blocks}


def operations(nodes: list[dict[str, Any]]) -> dict[str, int]:
    """Calls of our own operations (not ATen's) in a stored graph, by name."""
    found = Counter(str(n["target"]) for n in nodes if n["op"] == "call" and str(n["target"]).startswith("deepinfer"))
    return {name.removesuffix(".default"): count for name, count in sorted(found.items())}


def describe_caches(program: dict[str, Any], section: dict[str, Any]) -> list[dict[str, Any]]:
    """Caches of equal kind, window, dtype and shape as one entry, with the layers that write them."""
    page = int(section.get("page_size", PAGE_SIZE))
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for c in program.get("caches", ()):
        window = int(program["windows"][c["group"]])
        key = (c["kind"], window, c["dtype"], tuple(c["shape"]))
        per_token = prod(c["shape"]) * torch_dtype(c["dtype"]).itemsize / page
        made = {
            "kind": c["kind"],
            "window": window,
            "dtype": c["dtype"],
            "shape": c["shape"],
            "bytes_per_token": per_token,
        }
        found.setdefault(key, {**made, "layers": []})["layers"].append(int(c["layer"]))
    return list(found.values())


def describe_kernels(files: BundleFiles, programs: dict[str, Any]) -> list[dict[str, Any]]:
    """For variants whose block files name kernels: every node with its kernels, and what was left with the reason."""
    rows: list[dict[str, Any]] = []
    for target, variant in files.manifest.variants.items():
        if not variant.get("kernels"):
            continue
        records = {name: files.json(path) for name, path in variant["kernels"].items()}
        tuning = _tuning(files, target)
        if sampler := variant.get("sampler"):
            place = {"target": target, "program": "decode", "block": "logits", "node": "sample"}
            made = _kernel(None, sampler, records[sampler], "decode", 0)
            used = [{**made, "tuned": _tuned(tuning, sampler, None)}]
            rows.append({**place, "op": "deepinfer.sample", "kernel": "sample", "choices": used})
        for program, data in programs.items():
            for block, digest in data["blocks"].items():
                place = {"target": target, "program": program, "block": block}
                found = files.json(variant["blocks"][digest])["programs"][program]
                for node, entry in found["kernels"].items():
                    used = _choices(entry["choices"], program, records, tuning)
                    rows.append({**place, "node": node, "op": entry["op"], "kernel": entry["kernel"], "choices": used})
                for node, entry in found["left"].items():
                    rows.append({**place, "node": node, "op": entry["op"], "left": entry["reason"]})
    return rows


def _choices(
    given: list[tuple[int | None, str]], program: str, records: dict[str, Any], tuning: dict[str, Any]
) -> list[dict[str, Any]]:
    """What a node has for which numbers of tokens: kernels, and a library where that is chosen."""
    most = max((tokens for tokens, _ in given if tokens is not None), default=0)
    found: list[dict[str, Any]] = []
    for tokens, name in given:
        if name == LIBRARY:
            found.append({"tokens": tokens, "library": "torch"})
            continue
        made = _kernel(tokens, name, records[name], program, most)
        found.append({**made, "tuned": _tuned(tuning, name, tokens)})
    return found


def _number(value: Any, where: str) -> None:
    if value is not None:
        number(value, where)


_CHOICE = record({"upto": _number, "tokens": whole(1), "us": number, "default_us": _number})
_TUNING = record({"device": text, "kernels": table(items(_CHOICE))})


def _tuning(files: BundleFiles, target: str) -> dict[str, Any]:
    """What the manifest says of measured configurations of a target. Raises BundleCorrupt."""
    found: dict[str, Any] = files.manifest.tuning.get(target, {"device": "", "kernels": {}})
    try:
        _TUNING(found, f"tuning.{target}")
    except Malformed as error:
        raise BundleCorrupt(file=MANIFEST, reason=str(error)) from None
    return found


def _tuned(tuning: dict[str, Any], name: str, upto: int | None) -> dict[str, Any] | None:
    """Where the configuration of a choice was measured, None for a default."""
    told = next((t for t in tuning["kernels"].get(name, ()) if t["upto"] == upto), None)
    return {**told, "device": tuning["device"]} if told is not None else None


def _kernel(tokens: int | None, name: str, record: dict[str, Any], program: str, most: int) -> dict[str, Any]:
    """One choice: up to how many tokens, which config, what each launch of it takes, and its work at `at` tokens. A
    choice without a limit is shown above `most`, the largest limit beside it."""
    at = tokens if tokens is not None else max(2 * most, MANY if program == "prefill" else MOST)
    launches = [
        {"entry": launch["entry"], **{key: binary[key] for key in ("registers", "stack_bytes", "shared_bytes")}}
        for launch, binary in zip(record["plan"]["launches"], record["binaries"])
    ]
    made = {"tokens": tokens, "at": at, "hash": name, "config": record["config"], "launches": launches}
    return {**made, "work": _work(record, at, program)}


def kernel_case(record: dict[str, Any], tokens: int, program: str) -> tuple[AnySpec, Case[Any]] | None:
    """The kernel of a record and a batch for it: in prefill the tokens are one prompt, else a request each with a
    context of CONTEXT. None where the template is not the one it was made from."""
    try:
        template, data, digest = render.parse_stamp(record["stamp"])
        if render.digest(template) != digest:
            return None
        spec = next(s for s in specs() if s.name == record["kernel"] and s.op.name == record["op"])
    except (CompileError, TemplateNotFound, StopIteration):
        return None
    params = spec.params(**{name: render.decode(item) for name, item in data["params"].items()})
    if program == "prefill":
        return spec, Case("", params, (tokens,), (tokens,))
    return spec, Case("", params, (1,) * tokens, (CONTEXT,) * tokens)


def _work(record: dict[str, Any], tokens: int, program: str) -> dict[str, Any] | None:
    """What one call costs by the template's own count: flops, bytes, and the least time at the target's best rates."""
    found = kernel_case(record, tokens, program)
    if found is None:
        return None
    spec, case = found
    work = spec.work(case.params, case.new, case.lengths)
    seconds = get_target(record["target"]).limits.modelled(work)
    shape = {"tokens": sum(case.new), "context": case.lengths[0]}
    return {**shape, "flops": work.flops, "bytes": work.bytes, "seconds": seconds}


def _request_bytes(cache: dict[str, Any], limit: int) -> int:
    """Cache bytes of one request of `limit` tokens."""
    group = CacheGroup("", cache["window"], 0)
    pages = demand(group, seats=1, max_model_len=limit, chunk=min(WHOLE_STEP, limit), backtrack=0).one
    return int(min(pages, pages_for(limit)) * PAGE_SIZE * cache["bytes_per_token"] * len(cache["layers"]))


def _weights(files: BundleFiles) -> dict[str, Any]:
    manifest = files.manifest
    found: dict[str, Any] = {"mode": manifest.weights.mode, "folder": manifest.weights.folder}
    found["tensors"] = len(manifest.constants)
    found["bytes"] = sum(_bytes(c.dtype, c.shape) for c in _stored(manifest.constants, manifest.tied))
    found["stored_bytes"] = sum(e.size for name, e in manifest.files.items() if e.header_sha256)
    ledger = files.ledger() if LEDGER in manifest.files else None
    kinds = Counter(recipe_kind(r) for r in ledger.recipes.values()) if ledger else Counter()
    found["recipes"] = dict(kinds.most_common())
    found["constants"] = len(ledger.kept) if ledger else 0
    found["tied"] = [list(group) for group in manifest.tied]
    found["ignored"] = len(ledger.ignored) if ledger else 0
    found["notes"] = list(ledger.notes) if ledger else []
    return found


def _stored(constants: dict[str, Any], tied: tuple[tuple[str, ...], ...]) -> list[Any]:
    """Constants that have memory of their own: no views, one of each tied group."""
    copies = {name for group in tied for name in group[1:]}
    return [c for name, c in constants.items() if not c.of and name not in copies]


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * torch_dtype(dtype).itemsize


def recipe_kind(recipe: Any) -> str:
    """A recipe's operations from the outside in, without names: `cast of copy`, `stack of concat of fp8_block`."""
    if isinstance(recipe, str):
        return ""
    of = recipe.get("of")
    inner = recipe_kind((of[0] if isinstance(of, list) else of) if of is not None else "")
    return f"{recipe['op']} of {inner}" if inner else str(recipe["op"])


__all__ = ["describe_bundle", "describe_kernels", "kernel_case", "operations", "recipe_kind"]
