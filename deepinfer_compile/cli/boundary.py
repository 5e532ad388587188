"""Where errors end: one place that turns what a command raises into words, an exit code and, with --json, data.

A user's error gives its message in red on stderr and its own exit code; with --json the error is the JSON document on
stdout. An interruption gives 130. Anything else is a fault of this program and keeps its traceback.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from deepinfer_compile.errors import BadOption, CompileError

TRACEBACK = "DEEPINFER_TRACEBACK"
"""Environment variable: 1 lets a user's error through with its traceback."""
INTERRUPTED = 130

F = TypeVar("F", bound=Callable[..., Any])


def guarded(command: F) -> F:
    """A command whose errors are reported. It reads --json from the command's argument `as_json`, if there is one."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        _quiet()
        try:
            return command(*args, **options)
        except CompileError as err:
            if os.environ.get(TRACEBACK) == "1":
                raise
            _report({**err.as_json(), "notes": notes(err)}, message(err), bool(options.get("as_json")))
            raise typer.Exit(err.exit_code) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except OSError as err:
            if err.errno == errno.EPIPE or os.environ.get(TRACEBACK) == "1":
                raise
            text = f"{err.strerror or err}: {err.filename}" if err.filename else str(err)
            found: dict[str, object] = {
                "error": type(err).__name__,
                "what": text,
                "where": str(err.filename or ""),
                "try": "",
            }
            _report(found, text, bool(options.get("as_json")))
            raise typer.Exit(1) from None

    return run  # type: ignore[return-value]


def message(err: CompileError) -> str:
    """The whole message of an error, with the notes that were added to it on its way."""
    return "\n".join([str(err), *(f"  {note}" for note in notes(err))])


def notes(err: CompileError) -> list[str]:
    """What was added to an error on its way."""
    return list(getattr(err, "__notes__", ()))


def _report(data: dict[str, object], text: str, as_json: bool) -> None:
    if as_json:
        print_json(data)
        return
    from rich.text import Text

    from deepinfer_compile.cli.show import stderr

    stderr().print(Text(text, style="red"), soft_wrap=True)


def print_json(data: Any) -> None:
    """One JSON document on stdout. Raises ValueError for NaN and infinity, which JSON lacks."""
    print(json.dumps(data, indent=1, allow_nan=False, default=str), flush=True)


def _quiet() -> None:
    """Keep the chatter of libraries out of the output; our own warnings are RuntimeWarnings and stay."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category)


def usage(option: str, given: object, reason: str, fix: str) -> BadOption:
    """An error of the command line itself; exit code 2."""
    return BadOption(name=option, value=given, reason=reason, fix=fix)


__all__ = ["guarded", "message", "print_json", "usage"]
