"""`plan`: what a model takes, gives and costs on many ranks, from its config and a description of the hardware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_compile.cli.boundary import guarded, print_json, usage
from deepinfer_compile.cli.show import stderr, stdout, table
from deepinfer_compile.plan.hardware import known

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer_compile.plan.hardware import Hardware
    from deepinfer_compile.plan.load import Load
    from deepinfer_compile.plan.report import Plot, Section
    from deepinfer_compile.plan.request import Request
    from deepinfer_compile.plan.shape import Shape

BAR = 50
"""Columns of the longest bar."""


def _option(words: str, **more: Any) -> Any:
    return typer.Option(help=words, **more)


CONFIG_HELP = "Hugging Face folder, or a config.json."
HARDWARE_HELP = f"A description by name ({', '.join(known())}) or a .json file of that form."
SET_HELP = "Another value of a constant of the hardware; may be repeated."
TRACE_HELP = "JSON lists: tokens of each expert, layers by experts, or steps by layers by experts. Else it is drawn."
PRICES_HELP = "Dollars for a million tokens: in and cached, in and not, out."
TABLES_HELP = "Where memory tables lie: host (no memory of ranks) or sharded over the ranks of a unit."
JSON_HELP = "Write everything as JSON, with - to standard output instead of words; errors are JSON then too."


@guarded
def plan(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help=CONFIG_HELP)],
    hardware: Annotated[str, _option(HARDWARE_HELP, metavar="NAME|FILE")],
    prefill: Annotated[int, _option("Ranks of a prefill unit.")] = 4,
    decode: Annotated[int, _option("Ranks of a decode unit.")] = 64,
    redundant_prefill: Annotated[int, _option("Replicas of experts of a layer in prefill.")] = 0,
    redundant_decode: Annotated[int, _option("Replicas of experts of a layer in decode.")] = 0,
    batch: Annotated[int | None, _option("Requests of a decode rank; 128 or what fits by default.")] = None,
    context: Annotated[int, _option("Tokens of a request in decode, on average.")] = 4096,
    prompt: Annotated[int, _option("Tokens of a prompt.")] = 4096,
    prompt_tokens: Annotated[int, _option("Tokens that a prefill rank computes in a step.")] = 16384,
    hit: Annotated[float, _option("Share of prompts' tokens that a cache has, 0 to below 1.")] = 0.0,
    ratio: Annotated[float, _option("Tokens in for each one out.")] = 608 / 168,
    rows: Annotated[int, _option("Tokens that a request gives to a decode step: drafts and one.")] = 1,
    accepted: Annotated[float, _option("Tokens that a request gains by a decode step.")] = 1.0,
    microbatches: Annotated[int, _option("2 overlaps computing and exchanges, 1 does not.")] = 2,
    tables: Annotated[str, _option(TABLES_HELP)] = "host",
    trace: Annotated[Path | None, _option(TRACE_HELP, metavar="FILE")] = None,
    skew: Annotated[float, _option("Exponent by which a drawn load falls with an expert's rank; 0 is even.")] = 0.25,
    seed: Annotated[int, _option("Of drawn loads.")] = 0,
    policy: Annotated[str, _option("Balancer of replicas: balanced or published.")] = "balanced",
    price: Annotated[float | None, _option("Dollars of a rank an hour.")] = None,
    prices: Annotated[str | None, _option(PRICES_HELP, metavar="HIT,MISS,OUT")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=SET_HELP)] = None,
    with_sweep: Annotated[bool, typer.Option("--sweep", help="Also decode units of other sizes, with plots.")] = False,
    simulate: Annotated[int, _option("Decode steps to simulate beside the closed form.", metavar="STEPS")] = 0,
    markdown: Annotated[Path | None, _option("Write it as Markdown.", metavar="FILE")] = None,
    html: Annotated[Path | None, _option("Write it as one HTML page with plots.", metavar="FILE")] = None,
    as_json: Annotated[str | None, typer.Option("--json", metavar="FILE", help=JSON_HELP)] = None,
) -> None:
    """Predict memory, time, throughput and cost of a prefill and a decode unit of many ranks. Nothing is run or loaded.

    Constants come with their sources and can be replaced. What does not fit is a result, not an error.
    """
    from deepinfer_compile.plan.reading import read_shape
    from deepinfer_compile.plan.request import Request

    asked = Request(
        prefill, decode, redundant_prefill, redundant_decode, batch, context, prompt, prompt_tokens, hit, ratio,
        rows, accepted, microbatches, tables, policy, skew, seed, _prices(prices),
    )  # fmt: skip
    if simulate < 0:
        raise usage("--simulate", simulate, "it is a count", "give a whole number from 0")
    chip = _hardware(hardware, changes or [], price)
    shape = read_shape(config)
    data = _data(shape, chip, asked, _load(trace, shape, asked), with_sweep, simulate)
    _out(data, markdown, html, as_json)


def _prices(text: str | None) -> tuple[float, float, float] | None:
    if text is None:
        return None
    try:
        hit, miss, output = (float(part) for part in text.split(","))
    except ValueError:
        raise usage("--prices", text, "it is not three numbers", "give hit,miss,output such as 0.07,0.27,1.1") from None
    return hit, miss, output


def _hardware(name: str, changes: list[str], price: float | None) -> Hardware:
    from deepinfer_compile.plan.hardware import read_hardware

    values: dict[str, float] = {}
    for change in changes:
        key, _, value = change.partition("=")
        try:
            values[key] = float(value)
        except ValueError:
            raise usage("--set", change, "it is not NAME=VALUE with a number", "such as latency=2e-6") from None
    if price is not None:
        values["price_per_hour"] = price
    return read_hardware(name).with_(values)


def _load(trace: Path | None, shape: Shape, asked: Request) -> Load:
    from deepinfer_compile.plan.ledger import load_of
    from deepinfer_compile.plan.load import drawn

    if trace is None:
        return drawn(len(shape.routed_layers), shape.experts, asked.skew, asked.seed)
    try:
        counts = json.loads(trace.read_bytes())
    except (ValueError, RecursionError) as error:
        raise usage("--trace", str(trace), f"it is not JSON ({error})", "give nested lists of numbers") from None
    return load_of(counts, shape, trace.name)


def _data(shape: Shape, chip: Hardware, asked: Request, load: Load, with_sweep: bool, simulated: int) -> dict[str, Any]:
    from deepinfer_compile.plan.checking import check_decode
    from deepinfer_compile.plan.claims import claims
    from deepinfer_compile.plan.ledger import ledger, links, sweep, units
    from deepinfer_compile.plan.published import compared

    data = ledger(shape, chip, asked, load)
    data["sweep"] = sweep(shape, chip, asked, load) if with_sweep else None
    data["checked"] = None
    step = data["decode"]["step"]
    if simulated and step is not None:
        unit = units(shape, chip, asked, load)[1]
        data["checked"] = [check_decode(unit, step["requests"], simulated, asked.seed)]
    data["links"] = links(shape, chip, asked, load) if step is not None else None
    data["published"] = compared(asked)
    data["claims"] = claims(shape, chip, asked, load)
    return data


def _out(data: dict[str, Any], markdown: Path | None, html: Path | None, as_json: str | None) -> None:
    from deepinfer_compile.plan import pages
    from deepinfer_compile.plan.report import sections

    found = sections(data)
    texts = {markdown: pages.markdown(found), html: pages.html(found)}
    if as_json not in (None, "-"):
        texts[Path(str(as_json))] = json.dumps(data, indent=1, allow_nan=False) + "\n"
    for file, text in texts.items():
        if file is not None:
            _write(file, text)
    if as_json == "-":
        print_json(data)
        return
    for section in found:
        _show(section, stdout())


def _show(section: Section, console: Console) -> None:
    console.print(section.title, style="bold")
    for words in section.lines:
        console.print(words, style="red" if words.startswith("DOES NOT FIT") else None, soft_wrap=True)
    if section.columns:
        made = table(*section.columns, numbers=tuple(section.columns[i] for i in section.numbers))
        for row in section.rows:
            made.add_row(*row)
        console.print(made)
    for plot in section.plots:
        _bars(plot, console)
    console.print()


def _bars(plot: Plot, console: Console) -> None:
    from rich.bar import Bar

    most = max((v for v in plot.values if v is not None), default=0.0) or 1.0
    console.print(f"\n{plot.title}")
    made = table("ranks", "", " ", numbers=("ranks", ""))
    for label, value in zip(plot.labels, plot.values):
        shown = "does not fit" if value is None else f"{value:,.1f}"
        made.add_row(label, shown, Bar(most, 0, value or 0.0, width=BAR))
    console.print(made)


def _write(file: Path, text: str) -> None:
    """Replace the file in one step. Raises OutputFailed."""
    from deepinfer_compile.errors import OutputFailed

    scratch = file.with_name(f".{file.name}.tmp")
    try:
        scratch.write_text(text)
        scratch.replace(file)
    except OSError as err:
        scratch.unlink(missing_ok=True)
        raise OutputFailed(path=file, reason=err.strerror or str(err)) from None
    stderr().print(f"wrote {file}", soft_wrap=True)


__all__ = ["plan"]
