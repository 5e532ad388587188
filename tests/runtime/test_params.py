"""SamplingParams: vLLM's names and defaults, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from deepinfer_compile.errors import BadOption
from deepinfer_compile.runtime.params import SamplingParams


def test_names_and_defaults():
    assert {f.name: f.default for f in dataclasses.fields(SamplingParams)} == {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "retention": "chat",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", True),
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("stop", [""]),
        ("stop", ["a", 3]),
        ("stop", ""),
        ("stop", 3),
        ("stop_token_ids", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("prompt_logprobs", True),
    ],
)
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(BadOption) as caught:
        SamplingParams(**{name: value})
    assert caught.value.values["name"] == name
    assert "try:" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", np.float32(0.5)),
        ("top_k", np.int64(4)),
        ("top_k", -1),
        ("max_tokens", None),
        ("seed", -1),
        ("seed", 2**64 - 1),
        ("presence_penalty", -2),
        ("logprobs", -1),
        ("prompt_logprobs", 0),
    ],
)
def test_good_values_are_kept(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_combinations_that_cannot_be_met():
    with pytest.raises(BadOption, match="'n'"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(BadOption, match="'stop'"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(TypeError):
        SamplingParams(temprature=1)


def test_stops_become_tuples():
    params = SamplingParams(stop="ab", stop_token_ids=[3, np.int64(4)])
    assert params.stop_strings == ("ab",)
    assert params.stop_ids == (3, 4)
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_what_counts_as_greedy_and_penalised():
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy
    assert not SamplingParams().penalised
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{name: 0.5}).penalised
