"""The console script `deepinfer-compile`. Commands import torch and the compiler when they run, so help is quick."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Annotated

import typer

from deepinfer_compile import __version__
from deepinfer_compile.cli.balance_experts import eplb
from deepinfer_compile.cli.build_bundle import build
from deepinfer_compile.cli.check_environment import doctor
from deepinfer_compile.cli.debug_passes import bisect, dump, replay
from deepinfer_compile.cli.diff_bundles import diff
from deepinfer_compile.cli.explain_model import explain
from deepinfer_compile.cli.export_model import export
from deepinfer_compile.cli.inspect_bundle import inspect
from deepinfer_compile.cli.plan_cluster import plan
from deepinfer_compile.cli.render_kernel import render
from deepinfer_compile.cli.run_bundle import run
from deepinfer_compile.cli.support_table import support
from deepinfer_compile.cli.tune_kernels import tune
from deepinfer_compile.cli.verify_bundle import verify

COMMANDS = (
    build,
    run,
    inspect,
    verify,
    diff,
    explain,
    dump,
    replay,
    bisect,
    render,
    tune,
    eplb,
    plan,
    export,
    support,
    doctor,
)

app = typer.Typer(
    name="deepinfer-compile",
    help="Compile a PyTorch language model into a bundle of serving programs, and run, check and explain bundles.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in COMMANDS:
    app.command(command.__name__)(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Compile a PyTorch language model into a bundle of serving programs, and run, check and explain bundles."""


def main() -> None:
    """Entry point of the console script."""
    # a plain SIGTERM would skip the clean-up that removes half-written output
    signal.signal(signal.SIGTERM, _terminated)
    app()


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


__all__ = ["app", "main"]
