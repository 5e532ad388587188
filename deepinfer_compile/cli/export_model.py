"""`export`: a model in a format that other runtimes read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepinfer_compile.cli.boundary import guarded, print_json, usage
from deepinfer_compile.cli.build_bundle import JSON_OPTION
from deepinfer_compile.cli.show import size, stdout
from deepinfer_compile.cli.stages import Stages

FORMATS = ("onnx",)


@guarded
def export(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="Hugging Face folder with config and safetensors.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Where the model goes; ends in .onnx.")],
    format_: Annotated[str, typer.Option("--format", help=f"One of: {', '.join(FORMATS)}.")] = "onnx",
    dtype: Annotated[
        str, typer.Option(help="float32 (every runtime computes in it), bfloat16, or auto (the checkpoint's).")
    ] = "float32",
    verify: Annotated[
        bool, typer.Option("--verify", help="Run it in onnxruntime and compare the logits before it is put in place.")
    ] = False,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Export a model folder: input_ids and position_ids [1, tokens] in, logits [1, tokens, V] out.

    Large weights go to a file beside the model. What is at OUT is replaced only by a whole, checked model. Exit code 10
    if an operation has no form in the format; the error names it and its line.
    """
    if format_ not in FORMATS:
        raise usage("--format", format_, "there is no such format", f"use one of {', '.join(FORMATS)}")
    from deepinfer_compile.onnx_export import export_onnx

    with Stages() as stages:
        made = export_onnx(model, out, dtype=dtype, verify=verify, progress=stages)
    found = {
        "path": str(made.path),
        "data": str(made.data) if made.data else None,
        "inputs": list(made.inputs),
        "nodes": made.nodes,
        "weight_bytes": made.weight_bytes,
        "errors": {str(length): error for length, error in made.errors.items()},
    }
    if as_json:
        print_json(found)
        return
    console = stdout()
    console.print(f"{out}: {made.nodes} nodes, weights {size(made.weight_bytes)}", style="bold", soft_wrap=True)
    if made.data is not None:
        console.print(f"  weights in {made.data.name}, which must stay beside it", soft_wrap=True)
    console.print(f"  inputs: {', '.join(made.inputs)}, each i64 [1, tokens]; output: logits [1, tokens, V]")
    for length, error in made.errors.items():
        console.print(f"  {length} tokens in onnxruntime: largest difference {error:.1e} of the largest logit")


__all__ = ["export"]
