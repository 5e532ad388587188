"""How the dialect treats packed tokens: attention is the one family that may read other tokens, through its caches."""

from __future__ import annotations

from torch.fx import Node

from deepinfer_compile.graph import tensor
from deepinfer_compile.rowwise import Call, Kind, Rows, Value, aligned, rule


def expect(call: Call, name: str, dim: int) -> Rows:
    """An operand that must run over tokens in one known dimension, one element a token."""
    arg = call.arg(name)
    found = call.rows(arg)
    if found.dim != dim or found.inner != 1:
        call.refuse(f"operand {name} must run over rows in dimension {dim}, and does in {found.dim}")
    return found


def not_last(call: Call, name: str) -> Rows:
    """An operand that runs over tokens in any dimension but the last."""
    arg = call.arg(name)
    found = call.rows(arg)
    if found.dim == call.rank(arg) - 1:
        call.refuse(f"it reduces {name} over its last dimension, which runs over the tokens")
    return found


@rule("deepinfer.rms_norm")
def _rms_norm(call: Call) -> Value:
    call.constant(call.arg("weight"), "the weight")
    return not_last(call, "x")


@rule("deepinfer.add_rms_norm")
def _add_rms_norm(call: Call) -> Value:
    call.constant(call.arg("weight"), "the weight")
    not_last(call, "x")
    both = aligned(call, [call.arg("x"), call.arg("residual")], call.rank(call.arg("x")))
    return both, both


@rule("deepinfer.gated_act")
def _gated_act(call: Call) -> Value:
    return aligned(call, [call.arg("gate"), call.arg("up")], call.result_rank())


@rule("deepinfer.rope", "deepinfer.partial_rope")
def _rope(call: Call) -> Value:
    not_last(call, "x")
    return aligned(call, [call.arg(n) for n in ("x", "cos", "sin")], call.result_rank())


@rule("deepinfer.complex_rope_table")
def _complex_rope_table(call: Call) -> Value:
    return call.same_for_all(call.rows(call.arg("table")))


@rule("deepinfer.rotary_table")
def _rotary_table(call: Call) -> Value:
    call.constant(call.arg("inv_freq"), "inv_freq")
    return call.same_for_all(call.of(call.arg("position_ids")))


@rule("deepinfer.balance_streams")
def _balance_streams(call: Call) -> Value:
    return _outside(call, 2, "logits")


@rule("deepinfer.mix_streams")
def _mix_streams(call: Call) -> Value:
    for name in ("weight", "base", "scale"):
        call.constant(call.arg(name), name)
    return call.same_for_all(_outside(call, 2, "streams"))


@rule("deepinfer.collapse_streams")
def _collapse_streams(call: Call) -> Value:
    return _alike(call, _outside(call, 2, "streams"), _outside(call, 1, "pre"))


@rule("deepinfer.join_streams")
def _join_streams(call: Call) -> Value:
    inner = (("streams", 2), ("y", 1), ("post", 1), ("comb", 2))
    return _alike(call, *(_outside(call, count, name) for name, count in inner))


def _outside(call: Call, inner: int, name: str) -> Value:
    """An operand that is constant or runs over tokens in a dimension before its last `inner` ones."""
    arg = call.arg(name)
    found = call.of(arg)
    if found is Kind.CONST:
        return found
    rows = call.rows(arg)
    if rows.dim >= call.rank(arg) - inner:
        call.refuse(f"it mixes {name} along the dimension that runs over the tokens")
    return rows


def _alike(call: Call, *found: Value) -> Value:
    """Operands that are constant or run over tokens in one dimension, counted from the left."""
    rows = [f for f in found if f is not Kind.CONST]
    if any(f != rows[0] for f in rows):
        call.refuse("its operands run over tokens in different dimensions")
    return rows[0] if rows else Kind.CONST


@rule("deepinfer.route")
def _route(call: Call) -> Value:
    call.constant(call.arg("bias"), "the bias")
    return call.same_for_all(not_last(call, "logits"))


@rule("deepinfer.experts")
def _experts(call: Call) -> Value:
    for name in ("w13", "w2", "b13", "b2"):
        call.constant(call.arg(name), name)
    return _agree(call, [expect(call, name, 0) for name in ("x", "ids", "weights")])


@rule("deepinfer.dispatch")
def _dispatch(call: Call) -> Value:
    axis = _agree(call, [expect(call, name, 0) for name in ("x", "ids")]).axis
    arrived = Rows(f"arrived of {axis}", 0)
    return arrived, arrived, Rows(axis, 0), Kind.BATCH


@rule("deepinfer.combine")
def _combine(call: Call) -> Value:
    found = _agree(call, [expect(call, name, 0) for name in ("row", "weights")])
    if expect(call, "y", 0).axis != f"arrived of {found.axis}":
        call.refuse("y is not made of the rows that were sent")
    return found


@rule("deepinfer.output_projection")
def _output_projection(call: Call) -> Value:
    x = call.arg("x")
    found = expect(call, "x", call.rank(x) - 2)
    if (call.of(call.arg("rows")), found.axis) not in ((Kind.ROW_IDS, "tokens"), (Kind.KEPT_ROW_IDS, "kept")):
        call.refuse("its rows are not the input `rows`")
    call.constant(call.arg("weight"), "the weight")
    call.constant(call.arg("bias"), "the bias")
    return Rows("rows", found.dim)


@rule("deepinfer.attention")
def _attention(call: Call) -> Value:
    call.constant(call.arg("sinks"), "the sinks")
    if call.arg("mask") is not None:
        call.refuse("an explicit mask may show tokens of other requests")
    _agree(call, [expect(call, name, 2) for name in ("q", "k", "v")])
    return Rows("tokens", 1)


@rule("deepinfer.latent_attention")
def _latent_attention(call: Call) -> Value:
    call.constant(call.arg("w_uk"), "w_uk")
    call.constant(call.arg("w_uv"), "w_uv")
    _agree(call, [expect(call, n, d) for n, d in (("q_nope", 2), ("q_rope", 2), ("c", 1), ("k_rope", 1))])
    return Rows("tokens", 1)


@rule("deepinfer.cached_attention")
def _cached_attention(call: Call) -> Value:
    call.constant(call.arg("sinks"), "the sinks")
    _cache(call, call.arg("kv"))
    return _described(call, _agree(call, [expect(call, name, 0) for name in ("q", "k", "v", "slot")]))


@rule("deepinfer.write_kv")
def _write_kv(call: Call) -> Value:
    _cache(call, call.arg("kv"))
    return _agree(call, [expect(call, name, 0) for name in ("k", "v", "slot")])


@rule("deepinfer.shared_attention")
def _shared_attention(call: Call) -> Value:
    call.constant(call.arg("sinks"), "the sinks")
    _cache(call, call.arg("kv"))
    return _described(call, _agree(call, [expect(call, name, 0) for name in ("q", "slot")]))


def _described(call: Call, found: Rows) -> Rows:
    """The rows that attend, whose metadata must be theirs."""
    wanted = {"tokens": Kind.BATCH, "rows": Kind.ROW_BATCH, "kept": Kind.KEPT_BATCH}[found.axis]
    for name in ("query_start", "seq_len", "block_table"):
        if call.of(call.arg(name)) is not wanted:
            call.refuse(f"{name} is not the metadata of the {found.axis} that attend")
    return found


@rule("deepinfer.kept_batch")
def _kept_batch(call: Call) -> Value:
    if call.of(call.arg("kept")) is not Kind.KEPT_IDS:
        call.refuse("its tokens are not the input `kept`")
    names = ("kept_start", "query_start", "seq_len", "block_table")
    if any(call.of(call.arg(n)) not in (Kind.BATCH, None) for n in names):
        call.refuse("its metadata is not that of the batch")
    return call.same_for_all(Kind.KEPT_BATCH)


@rule("deepinfer.row_batch")
def _row_batch(call: Call) -> Value:
    if call.of(call.arg("rows")) is not Kind.ROW_IDS:
        call.refuse("its rows are not the input `rows`")
    if any(call.of(call.arg(name)) is not Kind.BATCH for name in ("query_start", "seq_len", "block_table")):
        call.refuse("its metadata is not that of the batch")
    return call.same_for_all(Kind.ROW_BATCH)


@rule("deepinfer.cached_latent_attention")
def _cached_latent_attention(call: Call) -> Value:
    call.constant(call.arg("w_uk"), "w_uk")
    call.constant(call.arg("w_uv"), "w_uv")
    _cache(call, call.arg("latent"))
    return _agree(call, [expect(call, name, 0) for name in ("q_nope", "q_rope", "c", "k_rope", "slot")])


@rule("deepinfer.cached_recent")
def _cached_recent(call: Call) -> Value:
    call.constant(call.arg("fill"), "what stands before the start")
    _cache(call, call.arg("cache"))
    return _described(call, _agree(call, [expect(call, name, 0) for name in ("x", "slot")]))


@rule("deepinfer.pack_rows")
def _pack_rows(call: Call) -> Value:
    return not_last(call, "x")


@rule("deepinfer.unpack_rows")
def _unpack_rows(call: Call) -> Value:
    return not_last(call, "stored")


@rule("deepinfer.write_rows")
def _write_rows(call: Call) -> Value:
    _cache(call, call.arg("cache"))
    return _agree(call, [expect(call, name, 0) for name in ("rows", "slot")])


@rule("deepinfer.cached_select_rows")
def _cached_select_rows(call: Call) -> Value:
    _cache(call, call.arg("keys"))
    found = _described(call, _agree(call, _given(call, "q", "weights", "written", "candidates")))
    return call.same_for_all(found)


@rule("deepinfer.cached_selected_attention")
def _cached_selected_attention(call: Call) -> Value:
    call.constant(call.arg("sinks"), "the sinks")
    for name in ("cache", "rows"):
        if isinstance(call.arg(name), Node):
            _cache(call, call.arg(name))
    if call.of(call.arg("rows_table")) not in (Kind.BATCH, Kind.ROW_BATCH, Kind.KEPT_BATCH, None):
        call.refuse("rows_table is not a block table")
    return _described(call, _agree(call, _given(call, "q", "latents", "slot", "written", "chosen")))


def _given(call: Call, *names: str) -> list[Rows]:
    """Those of some operands that are there."""
    return [expect(call, name, 0) for name in names if isinstance(call.arg(name), Node)]


@rule("deepinfer.merge_attention")
def _merge_attention(call: Call) -> Value:
    return call.same_for_all(_agree(call, [expect(call, n, 0) for n in ("out_a", "lse_a", "out_b", "lse_b")]))


def _cache(call: Call, cache: Node) -> None:
    if call.of(cache) is not Kind.BATCH:
        call.refuse(f"{cache.name} {tuple(tensor(cache).shape)} is not a cache input")


def _agree(call: Call, found: list[Rows]) -> Rows:
    """Operands over the same axis; gives the first."""
    if len({f.axis for f in found}) > 1:
        call.refuse("its operands run over different rows")
    return found[0]
