"""Every architecture reads its cache in chunks and still equals eager."""

import pytest
import torch

from deepinfer_compile.capture import capture
from deepinfer_compile.passes.cache_attention import CacheAttention
from deepinfer_compile.passes.split_encoder_decoder import SplitEncoderDecoder
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.presets import RAISE
from deepinfer_compile.program import Program
from deepinfer_compile.replay import trace_of, weights_from
from tests.architectures import FIRST
from tests.passes.harness import calls, check_equal
from tests.passes.stages import canonical, go_on
from tests.shared_kv import VOCAB, Decoder
from tests.shared_kv import Form as SharedForm
from tests.yoco_model import Form, make_yoco


@pytest.mark.parametrize("name", FIRST)
def test_cached_equals_eager(name: str) -> None:
    model, before = canonical(name)
    program, _ = go_on(before, CacheAttention())
    assert calls(program, "deepinfer.attention") == 0
    assert len(program.caches) == model.config.num_hidden_layers
    check_equal(program, model)
    check_equal(program, model, chunk=13)


SHARED = {
    "one list": (lambda: make_yoco(Form()), 3, 3),
    "two lists": (lambda: make_yoco(Form(one_list=False)), 3, 3),
    "window between": (lambda: make_yoco(Form(upper=(0, 5, 0))), 4, 3),
    "one block": (lambda: make_yoco(Form(lower=(0,), upper=(0, 0))), 2, 2),
    # every layer makes keys of the shared value: one writing block for all of them, a cache each
    "each its own": (lambda: Decoder(SharedForm((0, 9, None, None), (False, True, True, True), 1, each=True)), 5, 3),
    "keys are values": (
        lambda: Decoder(SharedForm((0, 9, None, None), (False, True, True, True), 1, keys="latent")),
        3,
        3,
    ),
}
"""A model, how many caches it needs after the split, and how many of its attentions only read."""


FAST = (("one list", True), ("each its own", True), ("two lists", False))


@pytest.mark.parametrize(
    ("name", "split"),
    [pytest.param(n, s, marks=() if (n, s) in FAST else pytest.mark.slow) for n in SHARED for s in (True, False)],
)
def test_shared_keys_are_kept_once(name: str, split: bool) -> None:
    make, caches, readers = SHARED[name]
    model = make()
    passes = (*RAISE, *([SplitEncoderDecoder()] if split else []), CacheAttention())
    program = Pipeline(passes).run(capture(model))[0]
    assert len({c.name for c in program.caches}) == len(program.caches)
    if split:
        assert len(program.caches) == caches
        assert sum(calls_of(program, "shared_attention").values()) == readers
    ids = torch.randint(0, VOCAB, (70,), generator=torch.Generator().manual_seed(5)).tolist()
    rows = [0, 13, 40, 69]
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor([ids])}
        inputs |= {"position_ids": torch.arange(70)[None]} if isinstance(model, Decoder) else {}
        want = model(**inputs)[0, rows]
    trace = trace_of(program, weights_from(model), ids, rows, 13)
    assert not trace.stray
    assert float((trace.logits - want).abs().max()) < 2e-5


def calls_of(program: Program, op: str) -> dict[str, int]:
    """How often each call of the skeleton runs an operation."""
    return {
        call.name: sum(f"deepinfer.{op}.default" == str(n.target) for n in program.blocks[str(call.target)].graph.nodes)
        for call in program.calls()
    }


def test_layers_outside_the_list_have_caches_of_their_own() -> None:
    """The lower layers are part of the prefix, which stands where layer 0 of the list has its number."""
    program = Pipeline((*RAISE, CacheAttention())).run(capture(make_yoco(Form(one_list=False))))[0]
    assert [c.name for c in program.caches] == ["cache_prefix_0", "cache_prefix_1", "cache_0_0"]
