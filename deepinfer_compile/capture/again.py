"""Operators that a trace meets again are not worked out again.

The layers of a model call the same operators with operands of the same shapes over and over, and torch.export spends
milliseconds on each: the sizes that come out are symbolic arithmetic, and so is what is written down of a value. All of
that is known from the first such call. Within `met_again`, a call that was met before, with operands of the same
types, sizes and strides and the same numbers, is written into the graph with its own operands and its own place in the
model, and gives a copy of what the first one gave. Calls whose result may depend on more than that (values, random
numbers, writes, gradients) are left to torch, and so is everything where torch has not what this builds on.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

A = torch.ops.aten
APART = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
"""Tags of operators whose result depends on values, or that are not to be met twice."""
SPECIAL = (A.lift_fresh.default, A.lift_fresh_copy.default, A.lift.default, A.is_nonzero.default)
"""Operators of which the tracer makes something of its own."""
LOCK = threading.RLock()
"""What is replaced of torch is replaced for all threads."""
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unusual(Exception):
    """A call that is left to torch."""


class _Changed(Exception):
    """Torch is used in another way than here."""


@dataclass(frozen=True)
class _Torch:
    """What is used of torch's tracer; none of it is promised to stay."""

    tracing: Any
    proxy_call: Callable[..., Any]
    tracked: Any
    track: Callable[..., Any]
    track_all: Callable[..., Any]
    symbol: Callable[..., Any]
    copied: Callable[..., Any]
    lazy: Callable[[bool], Any]
    settings: Any
    autocast: Callable[[], bool]
    transforms: Callable[[], Any]

    def taken_apart(self, mode: Any) -> Any:
        """Operators that a trace does not write down as they are: torch 2.11 keeps them in one place for all."""
        own = getattr(mode, "decomposition_table", None)
        return getattr(self.tracing, "CURRENT_DECOMPOSITION_TABLE", {}) if own is None else own

    @staticmethod
    def found() -> _Torch | None:
        """None if something is not there."""
        try:
            tracing: Any = importlib.import_module("torch.fx.experimental.proxy_tensor")
            return _Torch(
                tracing,
                tracing.proxy_call,
                tracing._ProxyTensor,
                tracing.set_proxy_slot,
                tracing.track_tensor_tree,
                tracing.fetch_sym_proxy,
                importlib.import_module("torch._subclasses.fake_impls").fast_detach,
                importlib.import_module("torch.fx._lazy_graph_module")._use_lazy_graph_module,
                importlib.import_module("torch._dynamo.config"),
                torch._C._is_any_autocast_enabled,
                torch._C._functorch.peek_interpreter_stack,
            )
        except (ImportError, AttributeError):
            return None


def met_again(export: Callable[[], Any]) -> Any:
    """What `export()` gives, where torch.export works out each operator once for operands of one form.

    Raises what `export` raises. A torch that is used in another way here than it can be does the work alone.
    """
    torchs = _Torch.found()
    if torchs is None:
        return export()
    changed: list[BaseException] = []
    try:
        with LOCK, _remembering(torchs, changed):
            return export()
    except Exception:
        if not changed:
            raise
    return export()


@contextmanager
def _remembering(torchs: _Torch, changed: list[BaseException]) -> Iterator[None]:
    """Within, traces remember; `changed` gets the errors that show that torch is used in another way."""
    memories: dict[int, _Memory] = {}

    def call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        known = memories.get(id(mode))  # a memory holds its mode, so that no id is used twice
        if known is None:
            known = memories[id(mode)] = _Memory(torchs, mode)
        try:
            return known.call(func, pre_dispatch, args, kwargs)
        except (AttributeError, TypeError) as err:
            if not _is_ours(err):
                raise
            changed.append(err)
            raise _Changed from err  # a TypeError would be taken for an operand that has no such operator

    cached = torchs.settings.fake_tensor_cache_enabled
    torchs.tracing.proxy_call = call
    try:
        # code of graphs that are not run, and torch's own memory, which takes as long to fill as this saves
        with torchs.lazy(True), torchs.settings.patch(fake_tensor_cache_enabled=False):
            yield
    finally:
        torchs.tracing.proxy_call = torchs.proxy_call
        for memory in memories.values():
            for mode in memory.modes:
                mode.cache_enabled = cached and not mode.propagate_real_tensors


def _is_ours(err: BaseException) -> bool:
    """Whether an error comes from a line of this file: torch has changed."""
    trace, place = err.__traceback__, ""
    while trace is not None:
        place = trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
    return place == _is_ours.__code__.co_filename


@contextmanager
def unremembered(mode: Any) -> Iterator[None]:
    """Within, a mode of fake tensors does not remember what calls gave: to fill its memory takes as long as a call."""
    before = mode.cache_enabled
    mode.cache_enabled = False
    try:
        yield
    finally:
        mode.cache_enabled = before


def form_of(tensor: FakeTensor) -> tuple[Any, ...]:
    """All that can be told of a fake tensor but which tensor it is."""
    held: tuple[Any, ...] = (tensor.storage_offset(), *tensor.shape, *tensor.stride())
    sizes = [s.node._expr if type(s) is SymInt else s for s in held]
    bits = (tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.layout)
    return (tensor.dtype, tensor.fake_device, bits, *sizes)


class _Memory:
    """What the calls of one trace gave, by their form."""

    def __init__(self, torchs: _Torch, mode: Any) -> None:
        self.torch, self.mode, self.tracer = torchs, mode, mode.tracer
        self.symbol = torchs.symbol(self.tracer)
        self.known: dict[Any, Any] = {}
        self.stacks: dict[tuple[int, ...], str] = {}
        self.kept: list[Any] = []
        """the code whose ids are in `stacks`, so that no id is used twice"""
        self.fit: dict[Any, bool] = {}
        """by operator, whether what it gives may be remembered"""
        self.modes: set[Any] = set()
        """of the fake tensors that were met"""
        self.constant, self.varying = False, False
        """whether constants, and other tensors, are among the operands looked at"""

    def call(self, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        """What torch's `proxy_call` does."""
        try:
            key = self.key(func, pre_dispatch, args, kwargs)
        except _Unusual:
            return self.torch.proxy_call(self.mode, func, pre_dispatch, args, kwargs)
        like = self.known.get(key)
        if like is not None:
            return self.repeated(func, args, kwargs, like)
        out = self.torch.proxy_call(self.mode, func, pre_dispatch, args, kwargs)
        given = list(_tensors((args, kwargs)))
        if self.rememberable(func, out, given):
            same = [i for i, operand in enumerate(given) if operand is out]
            key = self.key(func, pre_dispatch, args, kwargs)  # what is known of sizes may have changed in the call
            self.known[key] = same[0] if same else self.copy(out)
        return out

    def key(self, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        """All that the form of a result depends on. Raises _Unusual."""
        fit = self.fit.get(func)
        if fit is None:
            fit = self.fit[func] = fits(func)
        if not fit or not pre_dispatch or self.mode.tracer is not self.tracer:
            raise _Unusual
        if func in self.torch.taken_apart(self.mode):
            raise _Unusual
        if torch.is_grad_enabled() or self.torch.autocast() or self.torch.transforms() is not None:
            raise _Unusual
        self.constant, self.varying = False, False
        forms = (self.form(args), self.form(kwargs))
        if self.constant and not self.varying:  # what is made of constants alone is a constant
            raise _Unusual
        return (func, forms, *[_learned(mode) for mode in self.modes])

    def form(self, held: Any) -> Any:
        """What a result depends on. Raises _Unusual."""
        kind = type(held)
        if kind is FakeTensor:
            return self.operand(held)
        if kind in PLAIN:
            return (kind, held)
        if kind is SymInt:
            return held.node._expr
        if kind is list or kind is tuple:
            return (kind, *[self.form(h) for h in held])
        if kind is dict:
            return tuple([(k, self.form(h)) for k, h in held.items()])
        raise _Unusual

    def operand(self, tensor: FakeTensor) -> Any:
        """The form of a tensor that the trace knows. Raises _Unusual."""
        found = self.tracer.tensor_tracker.get(tensor)
        if found is None:
            raise _Unusual
        if found.constant is None and tensor.constant is None:
            self.varying = True
        else:
            self.constant = True
        self.modes.add(tensor.fake_mode)
        return form_of(tensor)

    def rememberable(self, func: Any, out: Any, given: list[Tensor]) -> bool:
        """Whether a call was written as it is, and gave one of its operands, or new tensors that are no constants and
        whose sizes are known."""
        outs = out if type(out) in (list, tuple) else [out]
        for tensor in outs:
            if type(tensor) is not FakeTensor or tensor.constant is not None:
                return False
            found = self.tracer.tensor_tracker.get(tensor)
            if found is None or found.constant is not None:
                return False
            maker = found.proxy.node if outs[0] is out else found.proxy.node.args[0]
            if maker.target is not func or "unbacked_bindings" in maker.meta:
                return False
            operands = sum(operand is tensor for operand in given)
            if operands > 1 or (operands and outs[0] is not out):  # not to be told which
                return False
            self.modes.add(tensor.fake_mode)
        return bool(outs)

    def copy(self, out: Any) -> Any:
        """Tensors of the same form."""
        if isinstance(out, Tensor):
            return self.torch.copied(out.fake_mode, out)  # type: ignore[attr-defined]
        return type(out)([self.torch.copied(t.fake_mode, t) for t in out])

    def repeated(self, func: Any, args: Any, kwargs: Any, like: Any) -> Any:
        """A call that was met before."""
        tracer = self.tracer
        name = tracer.graph._target_to_str(func.overloadpacket.__name__)
        proxy = self.written(func, self.nodes(args), self.nodes(kwargs), name)
        if isinstance(like, int):  # one of the operands
            like = out = list(_tensors((args, kwargs)))[like]
        else:
            out = self.copy(like)
        if isinstance(out, Tensor):
            proxy.node.meta["val"] = self.copy(like)
            self.torch.track(out, tracer, self.torch.tracked(proxy, None))
        else:
            self.torch.track_all(out, proxy, constant=None, tracer=tracer)
        return out

    def written(self, func: Any, args: Any, kwargs: Any, name: str) -> Any:
        """The call's node. Its stack is put into words only where no call came from the same lines."""
        tracer = self.tracer
        wanted = tracer.record_stack_traces
        place = _place() if wanted else ()
        words = self.stacks.get(place)
        tracer.record_stack_traces = wanted and words is None
        try:
            node = tracer.create_node("call_function", func, args, kwargs, name, None)
        finally:
            tracer.record_stack_traces = wanted
        if words is not None:
            node.meta.setdefault("stack_trace", words)
        elif wanted and node.meta.get("stack_trace"):
            self.stacks[place] = node.meta["stack_trace"]
            self.kept.append(_codes())
        return tracer.proxy(node)

    def nodes(self, held: Any) -> Any:
        """Arguments as the graph holds them."""
        if isinstance(held, Tensor):
            return self.tracer.tensor_tracker[held].proxy.node
        if isinstance(held, SymInt):
            found = self.symbol(held)
            return getattr(found, "node", found)
        if isinstance(held, (list, tuple)):
            return type(held)([self.nodes(h) for h in held])
        if isinstance(held, dict):
            return {k: self.nodes(h) for k, h in held.items()}
        return held


def fits(func: Any) -> bool:
    """Whether an operator gives what depends on the form of its operands only."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or func in SPECIAL or func._schema.is_mutable:
        return False
    return not any(tag in func.tags for tag in APART)


def _learned(mode: Any) -> tuple[int, ...]:
    """How much a trace has learned about sizes so far."""
    env = mode.shape_env
    return () if env is None else (len(env.replacements), len(env.guards))


def _place() -> tuple[int, ...]:
    """Where the program is, caller by caller. Code itself would be slow to look up."""
    found: list[int] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        found += (id(frame.f_code), frame.f_lasti)
        frame = frame.f_back
    return tuple(found)


def _codes() -> list[Any]:
    """The code that `_place` names."""
    return [frame.f_code for frame, _ in walk_stack(sys._getframe(1))]


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, (list, tuple)):
        for h in held:
            yield from _tensors(h)
    elif isinstance(held, dict):
        for h in held.values():
            yield from _tensors(h)


__all__ = ["form_of", "met_again", "unremembered"]
