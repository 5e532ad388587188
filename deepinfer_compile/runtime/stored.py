"""Programs and graphs as a bundle stores them, checked to the last field before anything is made of them.

Digests detect damage, not malice: a bundle whose digests fit may still hold anything at all. Whatever it holds, loading
ends in a catalogue error that names the file and the place in it, never in a Python error from the middle of the
loader. What is checked is form: types, names that refer to something, counts that agree. That the numbers are right is
what `deepinfer-compile verify --against` is for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from deepinfer_compile.bundle import LEDGER, BundleFiles
from deepinfer_compile.bundle.safetensors_io import TORCH_DTYPES
from deepinfer_compile.errors import BundleCorrupt
from deepinfer_compile.runtime.interpret import decode, references, resolve
from deepinfer_compile.runtime.roles import PLAN, disagreement, plan_of, plans_of

PHASES = ("prefill", "decode", "verify")
MAX_DEPTH = 64
MOST = 1 << 40
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_DTYPES = frozenset(TORCH_DTYPES)

Form = Callable[[Any, str], None]
"""Raises Malformed unless a value, at a place given in words, has a form."""


class Malformed(Exception):
    """A value that has not the form it must have; the message is place and reason."""


def _refuse(where: str, reason: str) -> Malformed:
    return Malformed(f"{where} {reason}")


def text(value: Any, where: str) -> None:
    """A string."""
    if not isinstance(value, str) or len(value) > 4096:
        raise _refuse(where, "is not a string of at most 4096 characters")


def flag(value: Any, where: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise _refuse(where, "is not true or false")


def number(value: Any, where: str) -> None:
    """A number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise _refuse(where, "is not a number of at least 0")


def whole(low: int = 0) -> Form:
    """A whole number of at least `low`."""

    def form(value: Any, where: str) -> None:
        if type(value) is not int or not low <= value <= MOST:
            raise _refuse(where, f"is not a whole number from {low} to {MOST}")

    return form


def one_of(names: frozenset[str], what: str) -> Form:
    """One of a set of strings."""

    def form(value: Any, where: str) -> None:
        if not isinstance(value, str) or value not in names:
            raise _refuse(where, f"is {str(value)[:80]!r}, not {what}")

    return form


def digest(value: Any, where: str) -> None:
    """A SHA-256 in hexadecimal."""
    if not isinstance(value, str) or not _DIGEST.match(value):
        raise _refuse(where, "is not a SHA-256 in hexadecimal")


def anything(value: Any, where: str) -> None:
    """Whatever JSON holds."""


def items(form: Form, least: int = 0) -> Form:
    """A list."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or len(value) < least:
            raise _refuse(where, f"is not a list of {least} entries or more")
        for i, item in enumerate(value):
            form(item, f"{where}[{i}]")

    return check


def table(form: Form, least: int = 0) -> Form:
    """An object with any keys."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict) or len(value) < least:
            raise _refuse(where, f"is not an object of {least} entries or more")
        for key, item in value.items():
            form(item, f"{where}.{key[:80]}")

    return check


def record(needed: Mapping[str, Form], allowed: Mapping[str, Form] | None = None, *, closed: bool = True) -> Form:
    """An object with these keys, of which those of `allowed` may be absent; closed: and no others."""
    forms = {**needed, **(allowed or {})}

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _refuse(where, "is not an object")
        for key in value.keys() - forms.keys() if closed else ():
            raise _refuse(where, f"has the unknown key {key[:80]!r}")
        for key in needed.keys() - value.keys():
            raise _refuse(where, f"lacks the key {key!r}")
        for key in value.keys() & forms.keys():
            forms[key](value[key], f"{where}.{key}")

    return check


def _size(value: Any, where: str) -> None:
    if not isinstance(value, str):
        whole()(value, where)


def _kept(value: Any, where: str, depth: int = 0) -> None:
    """A recorded value: a tensor's dtype and shape, several of them, or a number."""
    if depth > MAX_DEPTH:
        raise _refuse(where, "is nested too deeply")
    if isinstance(value, dict) and value.keys() == {"items"}:
        items(lambda v, w: _kept(v, w, depth + 1))(value["items"], f"{where}.items")
    elif isinstance(value, dict) and value.keys() == {"number"}:
        text(value["number"], f"{where}.number")
    else:
        record({"dtype": _dtype, "shape": items(_size)})(value, where)


_dtype = one_of(_DTYPES, "a known dtype")
_shape = items(whole())
_node = record(
    {"name": text, "op": one_of(frozenset(("input", "call", "block", "output")), "a kind of node")},
    {
        "target": text,
        "args": items(anything),
        "kwargs": table(anything),
        "val": _kept,
        "weight": text,
        "layer": lambda v, w: None if v is None else whole()(v, w),
        "place": text,
    },
)
_graph = record({"nodes": items(_node, 1)})
_plan = record(dict.fromkeys(PLAN, whole(1)))
_weight = record({"tensor": text, "dtype": _dtype, "shape": _shape, "constant": flag}, {"experts": items(whole(), 2)})
_cache = record(
    {"name": text, "kind": text, "group": whole(), "layer": whole(), "shape": items(whole(1)), "dtype": _dtype},
    closed=False,
)
_program = record(
    {
        "name": text,
        "skeleton": _graph,
        "blocks": table(digest, 1),
        "weights": table(_weight),
        "caches": items(_cache),
        "windows": items(whole()),
        "facts": items(text),
        "info": table(anything),
    },
    closed=False,
)
_model = record(
    {
        "name": text,
        "vocab_size": whole(1),
        "max_model_len": whole(1),
        "eos_token_ids": items(whole()),
        "windows": items(whole()),
        "crossover": number,
        "info": table(anything),
    },
    closed=False,
)
_variant = record(
    {"native": flag, "requires": table(anything), "blocks": table(text), "libraries": items(text)},
    {"seconds": table(number), "notes": items(text), "kernels": table(text), "sampler": text},
    closed=False,
)


@dataclass(frozen=True)
class Stored:
    """The programs of a bundle by phase, and the graphs of their blocks by hash."""

    programs: dict[str, dict[str, Any]]
    graphs: dict[str, dict[str, Any]]


def read_programs(files: BundleFiles) -> Stored:
    """All programs and blocks, and what the manifest says beside them, checked. Raises BundleCorrupt, BundlePath."""
    manifest, stored = files.manifest, Stored({}, {})
    placed: dict[str, list[int]] = {}
    with _blaming("manifest.json"):
        _model(manifest.model, "model")
        if manifest.experts:
            for role, plan in plans_of(manifest.experts).items():
                _plan(plan, f"experts ({role})")
            if reason := disagreement(manifest.experts):
                raise _refuse("experts", f"cannot be shared: {reason}")
        table(_variant, 1)(manifest.variants, "variants")
        record(dict.fromkeys(PHASES, record({"file": text}, closed=False)), closed=False)(manifest.programs, "programs")
    for name, entry in manifest.programs.items():
        program = files.json(entry["file"])
        with _blaming(entry["file"]):
            _check_program(program, entry["file"])
            if program["name"] != name:
                raise _refuse("the program", f"is {program['name'][:80]!r} and stands for {name!r}")
            _check_spread(program, plan_of(manifest.experts, name), placed)
            if program["windows"] != manifest.model["windows"]:
                raise _refuse("the program", f"has the windows {program['windows']}, the manifest has others")
        for digest in program["blocks"].values():
            if digest not in stored.graphs:
                stored.graphs[digest] = _read_graph(files, digest)
        with _blaming(entry["file"]):
            _check_calls(program, {b: _interface(stored.graphs[d]) for b, d in program["blocks"].items()})
        stored.programs[name] = program
    if LEDGER in manifest.files:
        files.ledger()
    return stored


@contextmanager
def _blaming(file: str) -> Iterator[None]:
    """Turn what is malformed into a damaged file."""
    try:
        yield
    except Malformed as error:
        raise BundleCorrupt(file=file, reason=str(error)) from None


def _read_graph(files: BundleFiles, digest: str) -> dict[str, Any]:
    file = block_file(digest)
    graph: dict[str, Any] = files.json(file)
    with _blaming(file):
        if sha256(json.dumps(graph, sort_keys=True).encode()).hexdigest() != digest:
            raise _refuse("the graph", "is not the one that its name is the hash of")
    check_graph(graph, file)
    return graph


def check_graph(graph: Any, file: str) -> None:
    """A block's graph has the form it must have. Raises BundleCorrupt."""
    with _blaming(file):
        _graph(graph, "the graph")
        _check_nodes(graph["nodes"], file, ("input", "call", "output"))


def _check_program(program: Any, file: str) -> None:
    _program(program, "the program")
    _check_nodes(program["skeleton"]["nodes"], file, ("input", "call", "block", "output"))
    for node in program["skeleton"]["nodes"]:
        _check_skeleton_node(node, program)
    _check_caches(program)


def _check_spread(program: Mapping[str, Any], plan: Mapping[str, int], placed: dict[str, list[int]]) -> None:
    """Weights of slots are those of the plan, and in all programs of the same layer of it."""
    for name, weight in program["weights"].items():
        if "experts" not in weight:
            continue
        (layer, count), first = weight["experts"][:2], (weight["shape"] or [0])[0]
        fits = plan and layer < plan["layers"] and (count, first) == (plan["experts"], plan["room"])
        if not fits or placed.setdefault(weight["tensor"], weight["experts"]) != weight["experts"]:
            raise _refuse(f"weight {name[:80]!r}", "is of experts that the plan, or another program, has elsewhere")


def _check_calls(program: Mapping[str, Any], sizes: Mapping[str, tuple[int, int]]) -> None:
    """The skeleton gives each block as many values as it takes, and takes as many as it gives."""
    made: dict[str, int] = {}
    for node in program["skeleton"]["nodes"]:
        where = f"node {node['name'][:80]!r}"
        if node["op"] == "block":
            takes, made[node["name"]] = sizes[node["target"]]
            recorded = len(node["val"]["items"]) if "items" in node["val"] else 1
            if (len(node["args"]), recorded) != sizes[node["target"]]:
                raise _refuse(
                    where, f"calls {node['target']}, which takes {takes} values and gives {made[node['name']]}"
                )
        elif node["op"] == "call" and not 0 <= node["args"][1] < made.get(node["args"][0]["ref"], 0):
            raise _refuse(where, "takes an item that its block does not give")


def block_file(digest: str) -> str:
    """Where the graph of a block is stored."""
    return f"programs/blocks/{digest}.json"


def _interface(graph: Mapping[str, Any]) -> tuple[int, int]:
    """How many values a graph takes and gives."""
    out = graph["nodes"][-1]["args"][0]
    several = out["tuple"] if isinstance(out, dict) and "tuple" in out else out
    return sum(n["op"] == "input" for n in graph["nodes"]), len(several) if isinstance(several, list) else 1


def _check_nodes(nodes: list[dict[str, Any]], file: str, kinds: tuple[str, ...]) -> None:
    """Names are new, references are to earlier nodes, targets exist, the output is one and last."""
    known: set[str] = set()
    needed = {
        "input": {"val"},
        "call": {"target", "args", "val"},
        "block": {"target", "args", "val"},
        "output": {"args"},
    }
    for i, node in enumerate(nodes):
        where = f"node {i} ({node['name'][:80]!r})"
        if node["op"] not in kinds or node["name"] in known:
            raise _refuse(where, "is of a kind that has no place here, or its name is taken")
        for key in needed[node["op"]] - node.keys():
            raise _refuse(where, f"lacks the key {key!r}")
        for arg in (*node.get("args", ()), *node.get("kwargs", {}).values()):
            _check_argument(arg, where, known, file)
        if node["op"] == "call":
            resolve(node["target"], file)
        if (node["op"] == "output") != (i == len(nodes) - 1):
            raise _refuse(where, "is an output that is not last, or the last node and no output")
        known.add(node["name"])
    if len(nodes[-1]["args"]) != 1:
        raise _refuse("the output", "has not one argument")


def _check_argument(arg: Any, where: str, known: set[str], file: str, depth: int = 0) -> None:
    """An argument is of a form that `decode` knows and refers to nodes before it."""
    if depth > MAX_DEPTH:
        raise _refuse(where, "has an argument that is nested too deeply")
    if isinstance(arg, list):
        for item in arg:
            _check_argument(item, where, known, file, depth + 1)
        return
    if not isinstance(arg, dict):
        return
    if len(arg) != 1:
        raise _refuse(where, f"has an argument of {len(arg)} keys")
    ((kind, held),) = arg.items()
    if kind == "tuple":
        if not isinstance(held, list):
            raise _refuse(where, "has a tuple that is no list")
        _check_argument(held, where, known, file, depth + 1)
    elif not isinstance(held, str):
        raise _refuse(where, f"has an argument {kind[:80]!r} that is no string")
    elif kind != "ref":
        _decoded(arg, where, file)
    elif held not in known:
        raise _refuse(where, f"uses {held[:80]!r}, which is not made before it")


def _decoded(arg: dict[str, str], where: str, file: str) -> None:
    try:
        decode(arg, {}, file)
    except RuntimeError as error:  # torch's answer to a device that there is not
        raise _refuse(where, f"names {arg}: {str(error).splitlines()[0]}") from None


def _check_skeleton_node(node: Mapping[str, Any], program: Mapping[str, Any]) -> None:
    """A skeleton only calls blocks with values, and takes items of what they give."""
    where = f"node {node['name'][:80]!r}"
    args = node.get("args", [])
    if node["op"] == "block":
        if node["target"] not in program["blocks"]:
            raise _refuse(where, f"calls the block {node['target'][:80]!r}, which does not exist")
        if not all(isinstance(a, dict) and "ref" in a for a in args):
            raise _refuse(where, "gives a block something else than a value")
    elif node["op"] == "call":
        item = node["target"] == "getitem" and len(args) == 2 and len(references(args[0])) == 1
        if not item or "ref" not in args[0] or type(args[1]) is not int:
            raise _refuse(where, "is no item of what a block gives")
    elif node["op"] == "output" and not (isinstance(args[0], dict) and "ref" in args[0]):
        raise _refuse(where, "gives something else than a value")


def _check_caches(program: Mapping[str, Any]) -> None:
    inputs = {n["name"] for n in program["skeleton"]["nodes"] if n["op"] == "input"}
    for name in [*program["weights"], *(c["name"] for c in program["caches"])]:
        if name not in inputs:
            raise _refuse("the program", f"names {name[:80]!r}, which is no input of its skeleton")
    for cache in program["caches"]:
        if cache["group"] >= len(program["windows"]):
            raise _refuse(f"cache {cache['name'][:80]!r}", f"is in group {cache['group']}, which does not exist")
