"""The sweep: every legal configuration of a kernel on given shapes, right before fast, into a store.

A configuration is compared with the operation's reference, computed one type wider, on memory full of NaN. One that is
further off than the kernel's tolerance, that cannot be compiled, loaded or run, or that spills is recorded with the
reason and never timed. What is left is timed on a cold cache, and its results must afterwards be the bits they were
before. Operands are made once a shape, on the device. The default is measured first, so that every record says what
tuning gained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deepinfer_compile import render
from deepinfer_compile.errors import BadShapes, CompileError, SweepFailed
from deepinfer_compile.kernels import Call, Limits, Refused, fields_of
from deepinfer_compile.runtime.launch import LaunchPlan, check_operands, tensors_of
from deepinfer_compile.sweep_machine import Call as Prepared
from deepinfer_compile.sweep_machine import Machine, Timer, Timing, Unfit
from deepinfer_compile.sweep_shapes import DEFAULT, Shape, fault
from deepinfer_compile.sweep_worker import reason_of
from deepinfer_compile.tuned import why_not
from deepinfer_compile.tuning import Bucket, Journal, Key, Measurement, Record, Store

HOPELESS = 3.0
"""Times the best so far, beyond which a configuration is timed a few times only."""
SEED = 0
PHASES = ("decode", "verify", "prefill")
EXACT = {torch.float32: torch.float64}
"""The type that a reference computes in, by the kernel's; fp32 for all others."""
FAULTS = (ArithmeticError, LookupError, TypeError, ValueError)
"""What a kernel's own functions raise for Params that are none."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """A bucket in the store. stored: it was there before. resumed: measurements that a killed run had left."""

    shape: Shape
    key: Key
    bucket: Bucket
    stored: bool = False
    resumed: int = 0


@dataclass
class Sweep:
    """Measures shapes on a machine. again: what the store has for them is forgotten first. file: for messages."""

    machine: Machine
    timer: Timer
    store: Store
    progress: Progress = lambda text: None
    again: bool = False
    file: str = DEFAULT
    notes: dict[str, None] = field(default_factory=dict)

    def run(self, shapes: Sequence[Shape]) -> Iterator[Outcome]:
        """Every bucket as it is complete. Raises BadShapes, BadTuning, OutputBusy, SweepFailed."""
        shapes = [s for s in shapes if self._takes(s)]
        if not shapes:
            reason = f"none of them is for {self.machine.name}; {next(iter(self.notes), 'there are none')}"
            raise BadShapes(file=self.file, reason=reason, fix="give a file with shapes that it takes, or use a GPU")
        with self.machine:
            for (_, params), group in groupby(shapes, key=lambda s: (s.spec.op.name, s.params)):
                own = list(group)
                key = Key.of(own[0].spec, params, self.machine.target, self.machine.name)
                with self.store.claim(key):
                    self._look_around(key)
                    for shape in own:
                        yield self._bucket(shape, key)

    def _takes(self, shape: Shape) -> bool:
        """Whether the machine takes a shape; of the kernel's own cases others are left out, with a note."""
        known = shape.params.dtype in self.machine.dtypes
        reason = self._too_much(shape) if known else f"{self.machine.name} does not compute in {shape.params.dtype}"
        if reason and self.file != DEFAULT:
            raise BadShapes(file=self.file, reason=f"{shape}: {reason}", fix="measure it on a GPU")
        if reason:
            self.notes[f"left out: {shape}: {reason}"] = None
        return not reason

    def _too_much(self, shape: Shape) -> str:
        """Why operands are too large for the machine, or nothing. Raises BadShapes."""
        most = self.machine.most_bytes
        try:
            need = operand_bytes(shape, self.machine.limits) if most else 0
        except FAULTS as error:
            raise fault(shape, self.file, error) from None
        return f"its operands take {need} bytes, {self.machine.name} is given {most}" if need > most else ""

    def _look_around(self, key: Key) -> None:
        """Note the records for the same kernel and Params that are not this one."""
        for other in self.store.records():
            same = (other.key.op, other.key.params, other.key.target) == (key.op, key.params, key.target)
            if same and other.key != key:
                self.notes[f"not used: {self.store.path(other.key)}: {why_not(other, key)}"] = None

    def _bucket(self, shape: Shape, key: Key) -> Outcome:
        record = self.store.read(key)
        have = record.bucket(shape.tokens)
        if have is not None and self.again:
            record, have = record.without(shape.tokens), None
            self.store.write(record)
        if have is not None and have.requests != shape.requests:
            reason = f"{shape.tokens} tokens are in the store, measured with requests {have.requests}"
            raise BadShapes(file=self.file, reason=reason, fix="use --again to measure these in their place")
        if have is not None:
            return Outcome(shape, key, have, stored=True)
        return self._measured(shape, key, record)

    def _measured(self, shape: Shape, key: Key, record: Record) -> Outcome:
        journal = self.store.journal(key, shape.tokens, shape.requests)
        resumed = len(journal.found)
        configs = self._configs(shape)
        values = [render.encode_values(shape.spec.name, fields_of(c)) for c in configs]
        done = {repr(m.config): m for m in journal.found}
        left = [(c, v) for c, v in zip(configs, values) if repr(v) not in done]
        if left:
            bench = Bench(self.machine, self.timer, shape, self.file)
            bench.best = min((m.us for m in journal.found if m.us is not None), default=float("inf"))
            self._measure(bench, left, journal, len(configs))
        done = {repr(m.config): m for m in journal.found}
        bucket = Bucket(shape.tokens, shape.requests, tuple(done[repr(v)] for v in values))
        if bucket.best is None:
            journal.remove()
            reason = f"no configuration of {len(configs)} passed; the default: {bucket.measurements[0].rejected}"
            fix = "the kernel is wrong or cannot run on this device: run its tests (pytest -m gpu) there"
            raise SweepFailed(kernel=str(shape), reason=reason, fix=fix)
        self.store.write(record.having(bucket))
        journal.remove()
        return Outcome(shape, key, bucket, resumed=resumed)

    def _configs(self, shape: Shape) -> list[Any]:
        """Every legal configuration, the default first. Raises BadShapes."""
        limits = self.machine.limits
        try:
            usual = shape.spec.default(shape.params, limits, shape.tokens)
            return list(dict.fromkeys((usual, *shape.spec.space(shape.params, limits))))
        except FAULTS as error:
            raise fault(shape, self.file, error) from None

    def _measure(self, bench: Bench, left: list[tuple[Any, Any]], journal: Journal, count: int) -> None:
        """Add a measurement of every configuration to the journal."""
        shape, size = bench.shape, self.machine.group
        for begin in range(0, len(left), size):
            group = left[begin : begin + size]
            self.progress(f"{shape}: {len(journal.found)} of {count} done, compiling {len(group)}")
            reasons = self.machine.compile(shape.spec, shape.params, [c for c, _ in group], bench.operands)
            for (config, value), reason in zip(group, reasons, strict=True):
                broken = None
                try:
                    made = Measurement(value, rejected=reason) if reason else bench.measure(config, value)
                except RuntimeError as error:
                    made, broken = Measurement(value, rejected=reason_of(error)), error
                journal.add(made)
                if broken is not None:
                    fix = "run it again: it goes on after that configuration"
                    raise SweepFailed(kernel=f"{shape} with {config}", reason=made.rejected, fix=fix) from broken


class Bench:
    """One shape on a machine: its operands, what its results must be, and the measuring of a configuration."""

    def __init__(self, machine: Machine, timer: Timer, shape: Shape, file: str) -> None:
        """Make operands and reference. Raises BadShapes for Params that no graph gives, SweepFailed for no memory."""
        self.machine, self.timer, self.shape = machine, timer, shape
        self.best = float("inf")
        try:
            given = self._operands(file)
            self.operands = tensors_of(given)
            self.fresh = {name: self.operands[name].clone() for name in shape.spec.op.mutates}
            self.wanted, self.written = self._reference(given)
        except torch.OutOfMemoryError as error:
            fix = "measure fewer tokens, or on a device with more memory"
            raise SweepFailed(kernel=str(shape), reason=str(error).splitlines()[0], fix=fix) from None

    def _operands(self, file: str) -> dict[str, Any]:
        shape, device = self.shape, self.machine.device
        generator = torch.Generator(device).manual_seed(SEED)
        try:
            with torch.device(device):
                made = shape.spec.inputs(shape.case(), generator)
            given: dict[str, Any] = tree_map_only(Tensor, lambda t: t.to(device), made)
            bound = [shape.spec.bind(Call(shape.spec.op, given, phase)) for phase in PHASES]
            if not any(_fits(b, shape.params) for b in bound):
                other = bound[0].reason if isinstance(bound[0], Refused) else f"a graph would give {bound[0]}"
                raise ValueError(f"no graph gives these params: {other}")
            plan = shape.spec.plan(shape.params, shape.spec.default(shape.params, self.machine.limits, shape.tokens))
            check_operands(shape.spec.name, plan, tensors_of(given))
        except torch.OutOfMemoryError:
            raise
        except (*FAULTS, CompileError, RuntimeError) as error:
            raise fault(shape, file, error) from None
        return given

    def _reference(self, given: dict[str, Any]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Results, and operands as they are written, in the wider type."""
        spec, wide = self.shape.spec, EXACT.get(self.shape.params.dtype, torch.float32)
        floats = tree_map_only(Tensor, lambda t: t.to(wide) if t.is_floating_point() else t, given)
        with torch.no_grad():
            made = spec.op.reference(*floats.values())
        results = made if isinstance(made, tuple) else (made,)
        written = {name: floats[name].to(self.operands[name].dtype) for name in spec.op.mutates}
        del floats
        torch.cuda.empty_cache()  # the compilers want some memory too
        return results, written

    def measure(self, config: Any, value: dict[str, Any]) -> Measurement:
        """Compare, then time. Raises RuntimeError where the device itself failed."""
        try:
            timing = self._timed(config)
        except Unfit as unfit:
            return Measurement(value, rejected=str(unfit))
        except Exception as err:  # compilers and devices raise many unrelated types; the reason is recorded
            reason = reason_of(err)
            self.machine.sync()  # raises again, for every configuration to come, where the device is lost
            return Measurement(value, rejected=reason)
        self.best = min(self.best, timing.us)
        return Measurement(value, us=timing.us, samples=timing.samples)

    def _timed(self, config: Any) -> Timing:
        """Raises Unfit for a configuration that is wrong, and what the machine raises."""
        spec, params = self.shape.spec, self.shape.params
        call = self.machine.prepare(spec, params, config, self.operands)
        plan = spec.plan(params, config)
        names = [b.name for b in plan.results]
        self._poison(plan, call)
        call()
        self.machine.sync()
        self._compare(names, call)
        first = [call.tensors[name].clone() for name in names]
        timing = self.timer(call, HOPELESS * self.best)
        self.machine.sync()
        if not all(torch.equal(a, call.tensors[name]) for a, name in zip(first, names)):
            raise Unfit("two runs differ")
        return timing

    def _poison(self, plan: LaunchPlan, call: Prepared) -> None:
        """Results and scratch memory become NaN, or the least whole number; what is written becomes fresh."""
        for buffer in (*plan.results, *plan.scratch):
            tensor = call.tensors[buffer.name]
            tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
        for name, tensor in self.fresh.items():
            self.operands[name].copy_(tensor)

    def _compare(self, names: Sequence[str], call: Prepared) -> None:
        """Raises Unfit for a result that is wrong."""
        allowed = self.shape.spec.tolerance[self.shape.params.dtype]
        for name, want in zip(names, self.wanted, strict=True):
            found = call.tensors[name].view(want.shape)
            if not want.is_floating_point():
                if self.shape.spec.unordered:
                    found, want = found.sort().values, want.sort().values
                if not torch.equal(found, want):
                    raise Unfit(f"{name!r} differs from the reference")
                continue
            error = error_of(found, want)
            if not error <= allowed:
                raise Unfit(f"{name!r} is {error:.1e} of its largest value off, more than {allowed:.1e}")
        for name, want in self.written.items():
            found = self.operands[name]
            if not bool(((found == want) | (found.isnan() & want.isnan())).all()):
                raise Unfit(f"what it writes to {name!r} differs from what the reference writes")


def _fits(bound: Any, params: Any) -> bool:
    """Whether operands that bind to `bound` may be given to a kernel for `params`: they may be aligned to more."""
    if isinstance(bound, Refused) or not hasattr(bound, "align"):
        return bool(bound == params)
    return not bound.align % params.align and bool(replace(bound, align=params.align) == params)


def error_of(found: Tensor, want: Tensor) -> float:
    """The largest difference relative to the largest wanted value; NaN where there is one."""
    if not want.numel():
        return 0.0
    return float((found.to(want.dtype) - want).abs().max() / want.abs().max().clamp_min(1e-30))


def operand_bytes(shape: Shape, limits: Limits) -> int:
    """About what the operands take: what a call moves, or all weights if they are more. Raises ValueError."""
    spec, params, case = shape.spec, shape.params, shape.case()
    plan = spec.plan(params, spec.default(params, limits, shape.tokens))
    fixed = [[n for n in o.shape if n is not None] for o in plan.operands if None not in o.shape]
    weights = sum(prod(sizes) for sizes in fixed) * int(params.dtype.itemsize)
    return max(weights, spec.work(params, case.new, case.lengths).bytes)
