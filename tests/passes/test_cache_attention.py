"""Every architecture reads its cache in chunks and still equals eager."""

import pytest

from deepinfer_compile.passes.cache_attention import CacheAttention
from deepinfer_compile.passes.canonicalize import Canonicalize
from tests import models
from tests.passes.harness import calls, check_equal, run_passes


@pytest.mark.parametrize("name", models.CONFIGS)
def test_cached_equals_eager(name: str) -> None:
    model = models.make(name)
    program, _ = run_passes(model, Canonicalize(), CacheAttention())
    assert calls(program, "deepinfer.attention") == 0
    assert len(program.caches) == model.config.num_hidden_layers
    check_equal(program, model)
    check_equal(program, model, chunk=13)
