"""Everything a user can set for a build, one field each. Unknown names are errors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from deepinfer_compile.errors import BadOption, UnknownOption

DTYPES = ("auto", "float32", "bfloat16")
WEIGHTS = ("copy", "link", "none")
REPLAYS = ("compact", "off")


@dataclass(frozen=True)
class ExpertPlan:
    """Experts spread over ranks: each rank holds ceil(slots / ranks) slots of every layer, and a slot one expert.

    slots: the experts of a layer and as many copies of some as are beyond them; None is the experts alone. decode: of
    the programs that decode and verify, where other ranks run these; `ranks` then run the program that reads prompts.
    """

    ranks: int
    slots: int | None = None
    decode: ExpertPlan | None = None

    def of(self, program: str) -> ExpertPlan:
        """The plan of a program by its name."""
        return self if self.decode is None or program == "prefill" else self.decode

    def __post_init__(self) -> None:
        if self.decode is not None and (not isinstance(self.decode, ExpertPlan) or self.decode.decode is not None):
            fix = "use ExpertPlan(ranks=..., slots=...)"
            raise BadOption(name="decode", value=self.decode, reason="it is not a plan of one part", fix=fix)
        for name, count in (("ranks", self.ranks), ("slots", self.slots)):
            if count is not None and (type(count) is not int or count < 1):
                raise BadOption(name=name, value=count, reason="it is not a positive number", fix="use 1 or more")


@dataclass(frozen=True)
class BuildSettings:
    """Options of `build`.

    dtype: computing type; auto is the checkpoint's. max_model_len: longest context; None is the model's own.
    native: compile kernels (False: graph-only bundle). isa: x86-64-v3 or x86-64-v4 for the cpu target; None is this
    machine's. weights: copy into the bundle, link to the folder, or none. waive: passes that may miss what a preset
    says they must match. trim: trace only the first and last layer of each kind. tuned: folder of measurements (`tune
    --store`), from which kernels take their configurations.
    replay: of a model whose upper layers share keys, the rows of a prompt that they run on: those whose logits are
    wanted, for the layers where that is exact (compact), or all (off). keep: rows at the end of a prompt on which
    layers above the shared keys run that have windows of their own, at least the widest of them; 0 is all. It is an
    approximation unless they are as many as these windows reach, one behind the other.
    experts: spread the experts over ranks; the bundle then runs as so many processes. None keeps them together.
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    native: bool = True
    isa: str | None = None
    weights: str = "copy"
    waive: tuple[str, ...] = ()
    trim: bool = True
    tuned: str | PathLike[str] | None = None
    replay: str = "compact"
    keep: int = 0
    experts: ExpertPlan | None = None

    def __post_init__(self) -> None:
        isas = (None, "x86-64-v3", "x86-64-v4")
        for name, allowed in (("dtype", DTYPES), ("weights", WEIGHTS), ("isa", isas), ("replay", REPLAYS)):
            if getattr(self, name) not in allowed:
                raise BadOption(
                    name=name, value=getattr(self, name), reason="not one of the choices", fix=f"use one of {allowed}"
                )
        if self.experts is not None and not isinstance(self.experts, ExpertPlan):
            fix = "use ExpertPlan(ranks=..., slots=...)"
            raise BadOption(name="experts", value=self.experts, reason="it is no plan", fix=fix)
        if self.tuned is not None and not Path(self.tuned).is_dir():
            fix = "give the folder that `deepinfer-compile tune --store` wrote"
            raise BadOption(name="tuned", value=str(self.tuned), reason="there is no such folder", fix=fix)
        if self.keep < 0:
            raise BadOption(name="keep", value=self.keep, reason="it counts rows", fix="give 0 or more")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise BadOption(name="max_model_len", value=self.max_model_len, reason="not positive", fix="use 1 or more")

    @classmethod
    def of(cls, **options: Any) -> BuildSettings:
        """Settings from keyword arguments. Raises UnknownOption, BadOption."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownOption(name=name, known=", ".join(known))
        return cls(**options)
