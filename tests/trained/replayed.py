"""What replaying only the last rows of a prompt through the decoder does to the V4.1-form model on held-out text.

`python -m tests.trained.replayed` captures the trained model, splits it at the boundary that the pass finds, and reads
held-out texts of 1024 tokens. A prompt is all but the last 64 of them; the encoder reads it whole, the decoder its last
`keep` rows and then the 64 that follow, whose windows reach into what was not replayed. Said of these 64 tokens: the
share whose likeliest next token is that of the whole model, and the cost, beside the whole model's. From `halo` rows on
nothing changes; that row is there to show it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from deepinfer_compile.capture import capture
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_attention import RaiseAttention
from deepinfer_compile.passes.split_encoder_decoder import SplitEncoderDecoder, kept_rows
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.program import Program
from deepinfer_compile.replay import bind, weights_from
from tests.trained import ced_model, data
from tests.trained.evaluate import held_out

LENGTH, FOLLOWING = 1024, 64
KEEPS = (128, 140, 256)


@dataclass(frozen=True)
class Split:
    """The trained model as one program."""

    program: Program
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, model: DeepseekV41, replay: Literal["off", "mask", "compact"]) -> Split:
        passes = (Canonicalize(), RaiseAttention(), SplitEncoderDecoder(replay=replay))
        program, _ = Pipeline(passes).run(capture(model))
        return cls(program, bind(program, weights_from(model)))

    @torch.no_grad()
    def logits(self, ids: Tensor, keep: int) -> Tensor:
        """Logits of ids i64[T] with `keep` rows replayed: [K, V], or [T, V] where the decoder reads every row."""
        length = len(ids)
        given = {"input_ids": ids[None], "position_ids": torch.arange(length)[None], "kept": kept_rows(length, keep)}
        made: Tensor = self.program.run({**self.weights, **given})[0]
        return made


def measure(whole: Split, compact: Split, texts: list[Tensor], keeps: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row for the whole model and for each keep. texts: i64[LENGTH + 1] each."""
    found: dict[int, dict[str, float]] = {keep: {"nats": 0.0, "same": 0.0, "off by": 0.0} for keep in (0, *keeps)}
    for text in texts:
        targets = text[-FOLLOWING:]
        wanted = whole.logits(text[:-1], LENGTH)[-FOLLOWING:]
        for keep, row in found.items():
            made = wanted if keep == 0 else compact.logits(text[:-1], keep + FOLLOWING)[-FOLLOWING:]
            row["nats"] += float(cross_entropy(made, targets, reduction="sum"))
            row["same"] += float((made.argmax(-1) == wanted.argmax(-1)).sum())
            row["off by"] = max(row["off by"], float((made - wanted).abs().max()))
    count = len(texts) * FOLLOWING
    return [
        {
            "keep": keep or "all",
            "nats_per_token": round(row["nats"] / count, 4),
            "same_next_token": round(row["same"] / count, 4),
            "largest_difference": float(f"{row['off by']:.2g}"),
        }
        for keep, row in found.items()
    ]


def texts_of(count: int) -> list[Tensor]:
    """The beginnings of the held-out files that are long enough, `count` at most, in the model's own tokens."""
    held = held_out(data.HERE / "ced")
    files = (torch.from_numpy(held.file(i).astype("int64")) for i in range(len(held.names)))
    return [ids[: LENGTH + 1] for ids in files if len(ids) > LENGTH][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=32)
    count = parser.parse_args().texts
    model, _ = ced_model.load(data.HERE / "ced")
    whole, compact = Split.of(model, "off"), Split.of(model, "compact")
    split = compact.program.info["split"]
    texts = texts_of(count)
    rows = measure(whole, compact, texts, (*KEEPS, split["halo"]))
    said = {"boundary": split["layer"], "halo": split["halo"], "texts": len(texts), "tokens": len(texts) * FOLLOWING}
    print(json.dumps({**said, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
