"""The engine of a loaded bundle: weights that can be exchanged in place, and calls that all ranks make together."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer_compile.bundle import BundleFiles, Checkpoint, WeightFiles, reload_into
from deepinfer_compile.errors import BadOption, BadRequest, CompileError
from deepinfer_compile.runtime.batch import Executor
from deepinfer_compile.runtime.call import Call
from deepinfer_compile.runtime.driver import Driver
from deepinfer_compile.runtime.engine import Engine
from deepinfer_compile.runtime.llm import LLM, Stream
from deepinfer_compile.runtime.options import EngineOptions
from deepinfer_compile.runtime.outputs import RequestOutput
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.prompts import Prompt
from deepinfer_compile.runtime.roles import DECODE
from deepinfer_compile.runtime.spread import Spread, SpreadEngine, SpreadExecutor
from deepinfer_compile.runtime.stops import TextCodec
from deepinfer_compile.runtime.unit import UnitExecutor
from deepinfer_compile.runtime.units import unit_engine

if TYPE_CHECKING:
    from deepinfer_compile.eplb.placement import Ints, Placement
    from deepinfer_compile.runtime.rebalance import ExpertStats, Rebalance


class BundleLLM(LLM):
    """The engine of a loaded bundle: `LLM`, and its weights can be exchanged in place.

    checkpoint: where weights are read from, for a bundle without them. parts: of the tensors that hold experts of
    slots, the layer of the placement. ranks: of a bundle whose experts are spread over ranks. All of them make the same
    calls of `generate`, `as_completed`, `stream`, `place` and `balance`, each with prompts of its own, none where it
    has nothing to do, and a call ends on all of them at once; a stream that is left early must be closed. An error that
    concerns one rank is raised there when the others have ended. Then also raises RankLost, and BadRequest while
    another call is running. Where some ranks read prompts and others decode, the first have prompts and get the
    results; `decodes` says which.
    """

    files: BundleFiles
    weights: dict[str, Tensor]
    variant: str
    checkpoint: Path | None = None
    parts: dict[str, int]
    ranks: SpreadExecutor | None = None

    def _engine(
        self, executor: Executor, options: EngineOptions, eos_token_ids: Sequence[int], text: TextCodec | None
    ) -> Engine:
        if isinstance(executor, UnitExecutor):
            return unit_engine(executor, options, eos_token_ids, text)
        if isinstance(executor, SpreadExecutor):
            return SpreadEngine(executor, options, eos_token_ids=eos_token_ids)
        return super()._engine(executor, options, eos_token_ids, text)

    @property
    def role(self) -> str:
        """`prefill` on a rank that reads prompts for others to decode, `decode` on these, empty without such."""
        return self.ranks.unit.role if isinstance(self.ranks, UnitExecutor) else ""

    @property
    def decodes(self) -> bool:
        """Whether this rank takes no prompts, because it decodes those of others."""
        return self.role == DECODE

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """See `LLM.generate`."""
        with self.ranks.call() if self.ranks is not None else nullcontext():
            return super().generate(prompts, params, progress=progress, use_tqdm=use_tqdm)

    def as_completed(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[tuple[int, RequestOutput | CompileError]]:
        """See `LLM.as_completed`."""
        with self.ranks.call() if self.ranks is not None else nullcontext():
            yield from super().as_completed(prompts, params)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Stream:
        """See `LLM.stream`."""
        if self.ranks is None:
            return super().stream(prompts, params)
        self.ranks.begin()
        try:
            call = self._submit(prompts, params, streaming=True)
        except BaseException:
            self.ranks.end()
            raise
        return _SpreadStream(self._driver, call, self._codec, self.ranks)

    def place(self, placement: Placement | Ints) -> None:
        """Put other experts in the slots: weights of those that change are read, in place, and the programs get other
        tables.

        All ranks call it at the same time with the same placement, as `load` takes it. Weights come from where this
        bundle was loaded from. Raises BadOption, BadRequest, RankLost.
        """
        if self.ranks is None:
            raise _together("placement")
        with self.ranks.call():
            old = self.ranks.spread
            spread = Spread.of(old.section, old.ranks, placement)
            _Mover(self)(self.ranks, spread)

    def balance(self, options: Rebalance | None) -> None:
        """Place experts anew from now on, when their load asks for it; None: no more.

        All ranks call it at the same time with the same options. Raises BadOption, BadRequest, MissingExtra, RankLost.
        """
        from deepinfer_compile.runtime.rebalance import Balancer, Rebalance

        if options is not None and not isinstance(options, Rebalance):
            fix = "use Rebalance(interval=..., window=..., threshold=...)"
            raise BadOption(name="rebalance", value=options, reason="it is no Rebalance", fix=fix)
        if self.ranks is None and options is not None:
            raise _together("rebalance")
        if self.ranks is None:
            return
        ranks = self.ranks
        with ranks.call():
            if not ranks.ranks.alike(repr(options).encode()):
                reason, fix = "the ranks have different ones", "give all of them the same"
                raise BadOption(name="rebalance", value=options, reason=reason, fix=fix)
            ranks.balancer = None
            if options is not None:
                ranks.balancer = Balancer(options, ranks.tally, ranks.spread, _Mover(self))

    @property
    def expert_stats(self) -> ExpertStats:
        """What rebalancing of experts did so far; nothing where it was not asked for."""
        from deepinfer_compile.runtime.rebalance import ExpertStats

        balancer = self.ranks.balancer if self.ranks is not None else None
        return balancer.stats if balancer is not None else ExpertStats()

    def reload(self, checkpoint: str | Path) -> None:
        """Take the weights of another checkpoint of the same model, in place; on any error none is changed.

        Every tensor follows by the bundle's own recipes. Cached context of running requests would not fit the new
        weights, so there must be none. Raises BadRequest, and what reading a checkpoint raises.
        """
        if self.ranks is not None:
            fix = "build a bundle of that checkpoint"
            raise BadRequest(request="reload", reason="experts spread over ranks are not exchanged in place", fix=fix)
        if self.active:
            raise BadRequest(request=self.active[0], reason="it is running", fix="reload when all requests are done")
        source = Checkpoint.open(Path(checkpoint))
        identity = identity_of(self.files, self.variant, Path(checkpoint))
        try:
            reload_into(self.weights, self.files.ledger(), source)
        except CompileError:  # then no tensor was touched
            raise
        except BaseException:
            self.engine.forget_prefixes(secrets.token_hex(16))  # weights of both are no model's
            raise
        self.engine.forget_prefixes(identity)


def _together(option: str) -> BadOption:
    """That experts are not spread over ranks."""
    fix = "build with experts=ExpertPlan(ranks=...)"
    return BadOption(name=option, value="given", reason="the experts of this bundle are together", fix=fix)


class _Mover:
    """Puts placements in force between two steps. What this process has mapped holds the slots, so experts are read
    from another mapping of the files."""

    def __init__(self, llm: BundleLLM) -> None:
        self._source: WeightFiles = llm.files.weights(llm.checkpoint)
        self._weights, self._parts = llm.weights, llm.parts

    def __call__(self, executor: SpreadExecutor, spread: Spread) -> tuple[int, int]:
        """Slots of this rank whose expert is another one, and the bytes of their weights."""
        slots = size = 0
        with executor.whole("placing experts"):
            for layer in range(spread.section["layers"]):
                moved = self._layer(layer, executor.spread.experts_of(layer), spread.experts_of(layer))
                slots, size = slots + moved[0], size + moved[1]
            executor.use(spread)
        return slots, size

    def _layer(self, layer: int, was: list[int], experts: list[int]) -> tuple[int, int]:
        """All weights of a layer are there before the first is changed."""
        places = [place for place, expert in enumerate(experts) if expert != was[place]]
        if not places:
            return 0, 0
        names = [name for name, of in self._parts.items() if of == layer]
        rows = {name: self._source.rows(name, [experts[place] for place in places]) for name in names}
        for name, held in rows.items():
            there = self._weights[name]
            there.index_copy_(0, torch.tensor(places, device=there.device), held.to(there.device))
        filled = sum(experts[place] >= 0 for place in places)
        return filled, filled * sum(held[0].nbytes for held in rows.values())


class _SpreadStream(Stream):
    """A stream whose end waits for that of the other ranks'."""

    def __init__(self, driver: Driver, call: Call, codec: TextCodec | None, ranks: SpreadExecutor) -> None:
        super().__init__(driver, call, codec)
        self._ranks = ranks

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._ranks.end()


def identity_of(files: BundleFiles, variant: str, checkpoint: Path | None) -> str:
    """What decides cache rows beside their tokens: programs, weights, and what runs them.

    The manifest names the contents of all files of the bundle. Weights elsewhere go by names, sizes and times.
    """
    source = files.manifest.weights
    folder = checkpoint or (Path(source.folder) if source.mode != "copy" and source.folder else None)
    parts = [(files.root / "manifest.json").read_text(), variant, torch.__version__]
    for file in sorted(folder.resolve().iterdir()) if folder is not None else ():
        if file.suffix in (".safetensors", ".json") and file.is_file():
            held = file.stat()
            parts.append(f"{file} {held.st_size} {held.st_mtime_ns}")
    return json.dumps(parts)


__all__ = ["BundleLLM", "identity_of"]
