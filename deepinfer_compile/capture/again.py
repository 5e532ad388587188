"""Operators that a trace meets again are not worked out again.

The layers of a model call the same operators with operands of the same shapes over and over, and torch.export spends
milliseconds on each: what sizes come out is symbolic arithmetic, what is written down of a value is more of it, and a
stack is put into words. All of that is known from the first such call. Within `met_again`, a call that was met before,
with operands of the same types, sizes and strides and the same numbers, is written into the graph with its own operands
and its own place in the model, and gives a copy of what the first one gave. Calls whose result may depend on more than
that (values, random numbers, writes, constants, gradients) are left to torch, as is everything where torch has not what
this replaces.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

A = torch.ops.aten
APART = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
"""Tags of operators whose result depends on values, or that are not to be met twice."""
SPECIAL = (A.lift_fresh.default, A.lift_fresh_copy.default, A.lift.default, A.is_nonzero.default, A.detach.default)
"""Operators of which the tracer makes something of its own."""
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unusual(Exception):
    """A call that is left to torch."""


@contextmanager
def met_again() -> Iterator[None]:
    """Within, torch.export works out each operator once for operands of one form."""
    try:
        tracing: Any = importlib.import_module("torch.fx.experimental.proxy_tensor")
        copied = importlib.import_module("torch._subclasses.fake_impls").fast_detach
        lazy = importlib.import_module("torch.fx._lazy_graph_module")._use_lazy_graph_module
        whole = tracing.proxy_call
        made = tracing._ProxyTensor, tracing.set_proxy_slot, tracing.track_tensor_tree, tracing.fetch_sym_proxy
    except (ImportError, AttributeError):  # these are no promises of torch's
        yield
        return
    memories: dict[int, _Memory] = {}

    def call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        known = memories.get(id(mode))
        if known is None:
            known = memories[id(mode)] = _Memory(mode, whole, copied, *made)
        return known.call(func, pre_dispatch, args, kwargs)

    tracing.proxy_call = call
    try:
        with lazy(True):
            yield
    finally:
        tracing.proxy_call = whole


class _Memory:
    """What the calls of one trace gave, by their form."""

    def __init__(
        self,
        mode: Any,
        whole: Callable[..., Any],
        copied: Callable[..., Any],
        tracked: Any,
        track: Callable[..., Any],
        track_all: Callable[..., Any],
        symbol: Callable[..., Any],
    ) -> None:
        self.mode, self.tracer = mode, mode.tracer
        self.whole, self.copied = whole, copied
        self.tracked, self.track, self.track_all = tracked, track, track_all
        self.symbol = symbol(self.tracer)
        self.known: dict[Any, Any] = {}
        self.stacks: dict[tuple[int, ...], str] = {}
        self.kept: list[Any] = []
        """the code whose ids are in `stacks`, so that no id is used twice"""
        self.fit: dict[Any, bool] = {}
        """by operator, whether what it gives may be remembered"""
        self.constant, self.varying = False, False
        """whether constants, and other tensors, are among the operands looked at"""

    def call(self, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        """What `proxy_call` does."""
        try:
            key = self.key(func, args, kwargs)
        except _Unusual:
            return self.whole(self.mode, func, pre_dispatch, args, kwargs)
        like = self.known.get(key)
        if like is not None:
            return self.repeated(func, args, kwargs, like)
        out = self.whole(self.mode, func, pre_dispatch, args, kwargs)
        if self.rememberable(out, (args, kwargs)):
            self.known[key] = self.copy(out)
        return out

    def key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """All that the form of a result depends on. Raises _Unusual."""
        fit = self.fit.get(func)
        if fit is None:
            fit = self.fit[func] = self.fits(func)
        if not fit or torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            raise _Unusual
        self.constant, self.varying = False, False
        key = (func, self.form(args), self.form(kwargs))
        if self.constant and not self.varying:  # what is made of constants alone is a constant
            raise _Unusual
        return key

    def fits(self, func: Any) -> bool:
        """Whether an operator gives tensors that depend on the form of its operands only."""
        if not isinstance(func, OpOverload) or func.namespace != "aten" or func in SPECIAL:
            return False
        if func._schema.is_mutable or func in self.mode.decomposition_table:
            return False
        return not any(tag in func.tags for tag in APART)

    def form(self, held: Any) -> Any:
        """What a result depends on. Raises _Unusual."""
        kind = type(held)
        if kind is FakeTensor:
            return self.form_of(held)
        if kind in PLAIN:
            return (kind, held)
        if kind is SymInt:
            return held.node._expr
        if kind in (list, tuple) or isinstance(held, (list, tuple)):
            return tuple([self.form(h) for h in held])
        if kind is dict:
            return tuple([(k, self.form(h)) for k, h in held.items()])
        raise _Unusual

    def form_of(self, tensor: FakeTensor) -> Any:
        """Of a tensor that the trace knows. Raises _Unusual."""
        found = self.tracer.tensor_tracker.get(tensor)
        if found is None:
            raise _Unusual
        if found.constant is None and tensor.constant is None:
            self.varying = True
        else:
            self.constant = True
        sizes = [s if type(s) is int else s.node._expr for s in (*tensor.shape, *tensor.stride())]
        offset: Any = tensor.storage_offset()
        offset = offset if type(offset) is int else offset.node._expr
        bits = (tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.layout)
        return (tensor.dtype, tensor.fake_device, offset, bits, *sizes)

    def rememberable(self, out: Any, given: Any) -> bool:
        """Whether a call gave new tensors of its own that no constant and no size of unknown value belongs to."""
        outs = out if isinstance(out, (list, tuple)) else [out]
        operands = {id(t) for t in _tensors(given)}
        for tensor in outs:
            if type(tensor) is not FakeTensor or id(tensor) in operands or tensor.constant is not None:
                return False
            found = self.tracer.tensor_tracker.get(tensor)
            if found is None or found.constant is not None or "unbacked_bindings" in found.proxy.node.meta:
                return False
        return bool(outs)

    def copy(self, out: Any) -> Any:
        """Tensors of the same form."""
        if isinstance(out, (list, tuple)):
            return type(out)([self.copied(t.fake_mode, t) for t in out])
        return self.copied(out.fake_mode, out)

    def repeated(self, func: Any, args: Any, kwargs: Any, like: Any) -> Any:
        """A call that was met before."""
        tracer = self.tracer
        name = tracer.graph._target_to_str(func.overloadpacket.__name__)
        proxy = self.written(func, self.nodes(args), self.nodes(kwargs), name)
        out = self.copy(like)
        if isinstance(out, Tensor):
            proxy.node.meta["val"] = self.copy(like)
            self.track(out, tracer, self.tracked(proxy, None))
        else:
            self.track_all(out, proxy, constant=None, tracer=tracer)
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


__all__ = ["met_again"]
