"""`verify`: is a bundle intact, and does it still compute what the model it was built from computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_compile.cli.boundary import guarded, print_json
from deepinfer_compile.cli.build_bundle import JSON_OPTION
from deepinfer_compile.cli.show import plural, size, stdout, table
from deepinfer_compile.errors import BundleMismatch

if TYPE_CHECKING:
    from deepinfer_compile.bundle import BundleFiles


@guarded
def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE")],
    full: Annotated[bool, typer.Option("--full", help="Hash the weight data too.")] = False,
    against: Annotated[
        Path | None, typer.Option(metavar="MODEL_DIR", help="Compare logits with this model, run by Transformers.")
    ] = None,
    tolerance: Annotated[float | None, typer.Option(help="Largest error allowed; default: see below.")] = None,
    target: Annotated[str | None, typer.Option(help="Which of the bundle's targets to compare.")] = None,
    graph_only: Annotated[bool, typer.Option("--graph-only", help="Compare the graphs, not the native code.")] = False,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Check a bundle's integrity and, with --against, its numbers.

    Errors are the largest difference of logits from eager fp32, over the largest logit. An fp32 bundle must stay within
    2e-5; one in bfloat16 within twice the error of the eager model in bfloat16. Exit code 8 beyond that.
    """
    from deepinfer_compile.bundle import read_bundle

    files = read_bundle(bundle, "full" if full else "lazy")
    found = _integrity(files, full, against)
    if against is not None:
        from deepinfer_compile.cli.parity import compare

        found["parity"] = compare(files, against, target, not graph_only, tolerance)
    found["ok"] = found.get("parity", {}).get("ok", True)
    if as_json:
        print_json(found)
        if not found["ok"]:
            raise typer.Exit(BundleMismatch.exit_code)
        return
    _print(found)
    if not found["ok"]:
        raise BundleMismatch(path=bundle, model=against, detail=found["parity"]["detail"])


def _integrity(files: BundleFiles, full: bool, against: Path | None) -> dict[str, Any]:
    """What was checked. Mapping the weights proves every name, dtype and shape. Raises what that raises."""
    from deepinfer_compile.runtime.stored import read_programs

    manifest = files.manifest
    read_programs(files)
    given = against if manifest.weights.mode != "copy" else None
    mapped = manifest.weights.mode != "none" or given is not None
    if mapped:
        files.weights(given)
    return {
        "path": str(files.root),
        "files": len(manifest.files),
        "bytes": sum(entry.size for entry in manifest.files.values()),
        "weight_data": "hashed" if full else "headers only",
        "tensors": len(manifest.constants) if mapped else 0,
        "weights": manifest.weights.mode,
    }


def _print(found: dict[str, Any]) -> None:
    console = stdout()
    console.print(f"{found['path']}: {plural(found['files'], 'file')}, {size(found['bytes'])}, intact", soft_wrap=True)
    if found["tensors"]:
        hashed = "weight data hashed" if found["weight_data"] == "hashed" else "weight data not hashed (--full does)"
        console.print(f"{plural(found['tensors'], 'tensor')}: names, types and shapes agree; {hashed}")
    else:
        console.print("the bundle holds no weights and no folder was given, so no tensor was checked")
    parity = found.get("parity")
    if parity is None:
        return
    shown = table("sample", "tokens", "programs", "error", "same best token", numbers=("tokens", "error"))
    for s in parity["samples"]:
        agree = f"{s['same_best']} of {s['tokens']}"
        error = "differs in shape" if s["error"] is None else f"{s['error']:.1e}"
        shown.add_row(s["name"], str(s["tokens"]), ", ".join(s["programs"]), error, agree)
    console.print(shown)
    verdict = "within" if found["ok"] else "beyond"
    console.print(
        f"{verdict} the limit of {parity['limit']:.1e} ({parity['limit_is']})", style="" if found["ok"] else "red"
    )


__all__ = ["verify"]
