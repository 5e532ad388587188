"""The engine of a loaded bundle: weights that can be exchanged in place, and calls that all ranks make together."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer_compile.bundle import BundleFiles, Checkpoint, reload_into
from deepinfer_compile.errors import BadOption, BadRequest, CompileError
from deepinfer_compile.runtime.call import Call
from deepinfer_compile.runtime.driver import Driver
from deepinfer_compile.runtime.llm import LLM, Stream
from deepinfer_compile.runtime.outputs import RequestOutput
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.prompts import Prompt
from deepinfer_compile.runtime.spread import Spread, SpreadExecutor
from deepinfer_compile.runtime.stops import TextCodec

if TYPE_CHECKING:
    from deepinfer_compile.eplb.placement import Ints, Placement


class BundleLLM(LLM):
    """The engine of a loaded bundle: `LLM`, and its weights can be exchanged in place.

    checkpoint: where weights are read from, for a bundle without them. parts: of the tensors that hold experts of
    slots, the layer of the placement. ranks: of a bundle whose experts are spread over ranks. All of them make the same
    calls of `generate`, `stream` and `place`, each with prompts of its own, none where it has nothing to do, and a call
    ends on all of them at once; a stream that is left early must be closed. An error that concerns one rank is raised
    there when the others have ended. Then also raises RankLost, and BadRequest while another call is running.
    """

    files: BundleFiles
    weights: dict[str, Tensor]
    variant: str
    checkpoint: Path | None = None
    parts: dict[str, int]
    ranks: SpreadExecutor | None = None

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
        """Put other experts in the slots: their weights are read again, in place, and the programs get other tables.

        All ranks call it at the same time with the same placement, as `load` takes it. Weights come from where this
        bundle was loaded from. Raises BadOption, BadRequest, RankLost.
        """
        if self.ranks is None:
            fix = "build with experts=ExpertPlan(ranks=...)"
            raise BadOption(name="placement", value="given", reason="the experts of this bundle are together", fix=fix)
        with self.ranks.call():
            old = self.ranks.spread
            spread = Spread.of(old.section, old.ranks, placement)
            # what this process has mapped holds the slots, so the experts are read from another mapping
            source = self.files.weights(self.checkpoint)
            with self.ranks.whole("placing experts"):
                for name, layer in self.parts.items():
                    self.weights[name].copy_(source.rows(name, spread.experts_of(layer)))
                self.ranks.use(spread)

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
