"""The error catalogue: every way in which a user's request can fail, one class each.

Each class states what went wrong (`what`) and what to try (`hint`) as format strings over named values, so that every
message can be found by searching this file. `CompileError` is the base of all of them; command-line exit codes come
from `exit_code`. Raise as `MissingShard(file="a.safetensors", index="model.safetensors.index.json")`.
"""

from __future__ import annotations

from typing import ClassVar


class CompileError(Exception):
    """Base of all errors of this package.

    `values` are the named fields of `what` and `hint`; `where` is an optional place in the user's model or file.
    """

    what: ClassVar[str] = "{message}"
    hint: ClassVar[str] = ""
    exit_code: ClassVar[int] = 1

    def __init__(self, *, where: str = "", **values: object) -> None:
        self.where = where
        self.values = values
        super().__init__(self.render())

    def render(self) -> str:
        """The full message: what, where, what to try."""
        lines = [self.what.format(**self.values)]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.hint:
            lines.append(f"  try: {self.hint.format(**self.values)}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """The error as data, for `--json` output."""
        what, hint = self.what.format(**self.values), self.hint.format(**self.values)
        return {"error": type(self).__name__, "what": what, "where": self.where, "try": hint}


# -- options and environment ------------------------------------------------------------------------------------------


class UnknownOption(CompileError):
    what = "unknown option {name!r}; known options: {known}"
    hint = "correct the spelling; options are never ignored"
    exit_code = 2


class BadOption(CompileError):
    what = "option {name!r} cannot be {value!r}: {reason}"
    hint = "{fix}"
    exit_code = 2


class MissingExtra(CompileError):
    what = "{package} is needed for {purpose} and is not installed"
    hint = "pip install 'deepinfer-compile[{extra}]'"
    exit_code = 3


class NoCompiler(CompileError):
    what = "no C++ compiler was found ({tried}), so native kernels for target {target!r} cannot be built"
    hint = "install g++ or clang++, set CXX, or build with native=False for a graph-only bundle"
    exit_code = 3


class UnknownTarget(CompileError):
    what = "unknown target {name!r}; known targets: {known}"
    hint = "use one of the known names"
    exit_code = 2


class TargetUnavailable(CompileError):
    what = "target {target!r} cannot be built here: {reason}"
    hint = "{fix}"
    exit_code = 3


class NativeBuildFailed(CompileError):
    what = "compiling {what_} for target {target!r} failed: {reason}"
    hint = "read the compiler output in {log}; build with native=False to get a graph-only bundle"
    exit_code = 4


class KernelTooLarge(CompileError):
    what = "{what_} for target {target!r}: {entry} takes {needed} bytes of shared memory of {limit}"
    hint = "use another version of Triton, or build with native=False to get a graph-only bundle"
    exit_code = 4


class BadStamp(CompileError):
    what = "{stamp!r} is not the stamp of a kernel source: {reason}"
    hint = "give the first line of a rendered source, or the path of the file"
    exit_code = 2


class StaleStamp(CompileError):
    what = "the stamp was made from another version of {template}: its text has the hash {found}, here it is {known}"
    hint = "use the version of this package that rendered the file"
    exit_code = 2


class KernelOperand(CompileError):
    what = "kernel {kernel} takes {operand} as {expected}; it was given {found}"
    hint = "{fix}"
    exit_code = 9


# -- tuning -----------------------------------------------------------------------------------------------------------


class CannotMeasure(CompileError):
    what = "kernels cannot be measured here: {reason}"
    hint = "{fix}"
    exit_code = 3


class BadShapes(CompileError):
    what = "the shapes in {file} cannot be measured: {reason}"
    hint = "{fix}"
    exit_code = 2


class BadTuning(CompileError):
    what = "the tuning record {file} cannot be used: {reason}"
    hint = "move the file away and measure its shapes again; nothing of it was used"
    exit_code = 8


class SweepFailed(CompileError):
    what = "measuring {kernel} stopped: {reason}"
    hint = "{fix}"
    exit_code = 4


# -- capture ----------------------------------------------------------------------------------------------------------


class UnsupportedArchitecture(CompileError):
    what = "the model {name} cannot be captured: {reason}"
    hint = "{fix}"
    exit_code = 5


class BadModelConfig(CompileError):
    what = "config.json: {key} cannot be {value!r}: {reason}"
    hint = "correct {key}, or use the config.json that was published with the weights"


class UnsupportedConstruct(CompileError):
    what = "capture met a construct it cannot express as a graph: {construct}"
    hint = "{fix}"
    exit_code = 5


class CaptureMismatch(CompileError):
    what = "the captured graph does not compute what the model computes: {detail}"
    hint = "run `deepinfer-compile explain` on the model and report the first differing layer"
    exit_code = 5


class NotRowwise(CompileError):
    what = "node {node} ({target}) mixes tokens, so packed requests would see each other: {reason}"
    hint = "express it through attention, or build for one request at a time"
    exit_code = 5


class NoBoundary(CompileError):
    what = "the model cannot be split into an encoder and a decoder ({kind}): {reason}"
    hint = "{fix}"
    exit_code = 5


class DynamicRangeLost(CompileError):
    what = "input {name!r}, dimension {dim} was asked to be dynamic but capture fixed it to {value}"
    hint = "capture with an example size of at least 2"
    exit_code = 5


# -- passes -----------------------------------------------------------------------------------------------------------


class PipelineOrder(CompileError):
    what = "pass {name!r} needs the facts {missing}, which no earlier pass makes (or which {breaker} breaks)"
    hint = "move the pass, or insert the pass that makes the fact before it"
    exit_code = 6


class UnknownPass(CompileError):
    what = "no pass is called {name!r}; passes here: {known}"
    hint = "use one of these names"
    exit_code = 6


class PassFailed(CompileError):
    what = "pass {name!r} failed on graph {graph!r}: {reason}"
    hint = "the graph before the pass is kept{reproducer}"
    exit_code = 6


class NotFunctional(CompileError):
    what = "the graph cannot be made functional: {reason}"
    hint = "the backend leaves such a graph to Inductor; nothing has to be done"
    exit_code = 6


class GraphInvalid(CompileError):
    what = "graph {graph!r} is not valid after pass {name!r}: {problem}"
    hint = "this is a fault of the pass; bisect it with `deepinfer-compile bisect`"
    exit_code = 6


class ExpectedMatchMissing(CompileError):
    what = "pass {name!r} had to match {expected} and matched {found} in {graph}; nearest miss: {miss}"
    hint = "waive it with waive=({name!r},) if the unfused form is acceptable; the report records the waiver"
    exit_code = 6


class NumericMismatch(CompileError):
    what = "pass {name!r} changed the results: {detail}"
    hint = "narrow it with `deepinfer-compile bisect`"
    exit_code = 6


# -- weights ----------------------------------------------------------------------------------------------------------


class NotAModelFolder(CompileError):
    what = "{path} is not a model folder: {reason}"
    hint = "give a folder with config.json and *.safetensors"
    exit_code = 7


class MissingShard(CompileError):
    what = "weight file {file} is named by {index} and is not in the folder"
    hint = "download the missing file again"
    exit_code = 7


class MissingWeight(CompileError):
    what = "tensor {tensor!r} is needed by the model and is in no weight file"
    hint = "check that the checkpoint belongs to this config"
    exit_code = 7


class SurplusWeight(CompileError):
    what = "{file} holds the tensor {tensor!r}, which the model of this config has no place for"
    hint = "use the checkpoint that belongs to this config"
    exit_code = 7


class BadWeightFile(CompileError):
    what = "weight file {file} is damaged: {reason}"
    hint = "download or write the file again"
    exit_code = 7


class WeightMismatch(CompileError):
    what = "tensor {tensor!r}: expected {expected}, found {found}"
    hint = "use the checkpoint that belongs to this config, or rebuild the bundle"
    exit_code = 7


class TiedWeightConflict(CompileError):
    what = "the tied names {names} carry different values"
    hint = "give one of them, or equal values"
    exit_code = 7


class UnsupportedWeightFormat(CompileError):
    what = "weights in format {format!r} cannot be read: {reason}"
    hint = "convert the checkpoint to safetensors in fp32, fp16, bf16, FP8 block-scaled or MXFP4"
    exit_code = 7


# -- bundles ----------------------------------------------------------------------------------------------------------


class NotABundle(CompileError):
    what = "{path} is not a bundle: {reason}"
    hint = "build one with `deepinfer-compile build MODEL_DIR -o {path}`"
    exit_code = 8


class BundleCorrupt(CompileError):
    what = "bundle file {file} is damaged or was changed: {reason}"
    hint = "copy the bundle again or rebuild it"
    exit_code = 8


class BundleVersion(CompileError):
    what = "bundle format {found} was written by a {age} version; this one reads format {known}"
    hint = "rebuild the bundle, or install the matching version"
    exit_code = 8


class BundlePath(CompileError):
    what = "bundle entry {entry!r} is refused: {reason}"
    hint = "bundles hold plain files under relative paths only; rebuild it from the model"
    exit_code = 8


class BundleMismatch(CompileError):
    what = "bundle {path} does not compute what {model} computes: {detail}"
    hint = "check that it was built from this folder, then narrow it with `deepinfer-compile replay {model}`"
    exit_code = 8


class WrongTarget(CompileError):
    what = "this bundle was built for {built_for}; this machine offers {found}"
    hint = "{fix}"
    exit_code = 8


class OutputExists(CompileError):
    what = "{path} exists and is not a bundle, so it will not be replaced"
    hint = "choose another output path, or remove it yourself"
    exit_code = 8


class OutputBusy(CompileError):
    what = "another build is writing {path}"
    hint = "wait for it, or choose another output path"
    exit_code = 8


class OutputFailed(CompileError):
    what = "writing {path} failed: {reason}"
    hint = "free disk space, check permissions, or choose another output path; what was at that path is unchanged"
    exit_code = 8


# -- export -----------------------------------------------------------------------------------------------------------


class NoOnnxForm(CompileError):
    what = "operation {op} cannot be written as ONNX: {reason}"
    hint = "write that line with other operations, or report the operation with the model's architecture"
    exit_code = 10


class ExportInvalid(CompileError):
    what = "the exported model {path} is not valid: {reason}"
    hint = "report it with the model's architecture; what was at that path is unchanged"
    exit_code = 10


# -- running ----------------------------------------------------------------------------------------------------------


class ContextTooLong(CompileError):
    what = "request {request} needs {needed} tokens of context; this model was loaded for {limit}"
    hint = "shorten the prompt, lower max_tokens, or load with a larger max_model_len (built for {built})"
    exit_code = 9


class OutOfMemory(CompileError):
    what = "the cache does not fit: {arithmetic}"
    hint = "lower max_model_len or max_num_seqs, or raise memory_fraction"
    exit_code = 9


class BadRequest(CompileError):
    what = "request {request} is not valid: {reason}"
    hint = "{fix}"
    exit_code = 9


class NoTokenizer(CompileError):
    what = "this model has no tokenizer, so prompts must be token ids"
    hint = "pass a list of token ids, or rebuild from a folder with tokenizer.json"
    exit_code = 9


class BadTokenizer(CompileError):
    what = "the tokenizer {file} cannot be used: {reason}"
    hint = "{fix}"
    exit_code = 9


class BadChat(CompileError):
    what = "the chat cannot be rendered: {reason}"
    hint = "{fix}"
    exit_code = 9


class BadLogits(CompileError):
    what = "request {request}: the logits after position {position} have no finite maximum (NaN or infinity)"
    hint = "load the bundle with check='full' to look for damaged weights; half precision may overflow, build with fp32"
    exit_code = 9


class RankLost(CompileError):
    what = "{reason}; rank {rank} of {ranks} cannot go on"
    hint = "read what the others said, then start all of them again, from where a queue was; {patience}"
    exit_code = 9
