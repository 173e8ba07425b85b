"""The ops of a block: published totals, what must hold for any degrees, what is kept and what is alive."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

import meshwise as mw
from data_tables import csv_rows, table
from meshwise.core.errors import PlanError
from meshwise.cost.op import attended_pairs
from meshwise.estimate.timing import machine, op_times
from meshwise.model.architecture import Layer, Model, Recurrence
from meshwise.model.find import find_model
from meshwise.model.huggingface import model_from_config
from meshwise.plan.plan import Plan, parse_plan, plan_text
from meshwise.program.block import block
from meshwise.program.cut import Cut
from meshwise.program.lifetime import Script, peak_bytes, play
from meshwise.program.op import Op, Tensor, precision
from meshwise.program.tape import Tape
from meshwise.program.vocabulary import head
from meshwise.program.walk import activations, with_saved_bytes

GPT3 = find_model("gpt3-175b")


def total(ops: list[Op], field: str, **wanted: Any) -> Any:
    chosen = (op for op in ops if all(getattr(op, name) == value for name, value in wanted.items()))
    return sum(getattr(op, field) * op.count for op in chosen)


def flop(ops: list[Op], *, phase: str) -> Any:
    kinds = ("matmul", "attention")
    return sum(op.count * op.cost.flop for op in ops if op.phase == phase and op.kind in kinds)


# Korthikanti et al., arXiv 2205.05198, Table 2: bytes kept per layer over s b h, with a heads, h wide,
# s tokens, t tensor-parallel ranks. Statistics of the norms (4e-5 of the total) are left out there.
KEPT = {
    "no parallelism": (Cut(microbatch=1, seq=2048, flash=False), lambda t, r: 34 + r),
    "tensor": (Cut(microbatch=1, seq=2048, tp=8, flash=False), lambda t, r: 10 + 24 / t + r / t),
    "tensor + sequence": (
        Cut(microbatch=1, seq=2048, tp=8, sequence_parallel=True, flash=False),
        lambda t, r: (34 + r) / t,
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_bytes_kept_korthikanti_table_2(name: str) -> None:
    cut, formula = KEPT[name]
    sbh = cut.microbatch * cut.seq * GPT3.hidden
    expected = formula(cut.tp, 5 * GPT3.num_heads * cut.seq / GPT3.hidden)
    kept = total(with_saved_bytes(block(GPT3, cut)), "saved_bytes", phase="forward")
    assert kept / sbh == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("tp", [1, 8])
def test_bytes_kept_with_selective_recomputation_korthikanti_table_2(tp: int) -> None:
    cut = Cut(microbatch=1, seq=2048, tp=tp, sequence_parallel=True, flash=False)
    kept = activations(block(GPT3, cut)).kept_bytes
    assert kept / (cut.seq * GPT3.hidden) == pytest.approx(34 / tp, rel=2e-3)


def test_bytes_kept_by_the_head_korthikanti_section_4_3() -> None:
    """4 s b h / t (1 + v / h): the final norm and projection keep their inputs, the loss fp32 logits."""
    ops = with_saved_bytes(head(GPT3, Cut(microbatch=1, seq=2048, tp=8, sequence_parallel=True)))
    expected = 4 * 2048 * GPT3.hidden / 8 * (1 + GPT3.vocab / GPT3.hidden)
    assert total(ops, "saved_bytes") == pytest.approx(expected, rel=2e-3)


def test_forward_flop_korthikanti_appendix_a() -> None:
    """A layer is 24 b s h^2 + 4 b s^2 h FLOP when the masked scores are computed too."""
    s, h = 2048, GPT3.hidden
    ops = block(GPT3, Cut(microbatch=1, seq=s, flash=False))
    assert flop(ops, phase="forward") == 24 * s * h**2 + 4 * s**2 * h
    assert flop(ops, phase="backward") == 2 * flop(ops, phase="forward")


def test_fused_attention_skips_the_masked_half_and_computes_scores_twice() -> None:
    s, h = 2048, GPT3.hidden
    ops = [op for op in block(GPT3, Cut(microbatch=1, seq=s)) if op.kind == "attention"]
    assert [op.cost.flop for op in ops] == [2 * s**2 * h, 2.5 * 2 * s**2 * h]


def axis_bytes(ops: list[Op], phase: str) -> dict[str, float]:
    wanted = [op for op in ops if op.kind == "collective" and op.phase == phase and op.axis == "tp"]
    kinds = {op.collective for op in wanted}
    return {kind: sum(op.payload_bytes for op in wanted if op.collective == kind) for kind in kinds}


@pytest.mark.parametrize(("dtype", "gathered_bytes"), [("bf16", 2.0), ("fp8", 1.0), ("fp4", 0.5)])
def test_tensor_parallel_exchanges_korthikanti_section_4_2(dtype: str, gathered_bytes: float) -> None:
    """Two all-gathers and two reduce-scatters a direction; the backward gathers the kept shards again.

    Transformer Engine and torchao gather what a matmul reads in the matmul's type; sums travel in 16 bits.
    """
    size = 2048 * GPT3.hidden
    ops = block(GPT3, Cut(microbatch=1, seq=2048, tp=8, sequence_parallel=True, precision=precision(dtype)))
    summed, gathered = {"reduce_scatter": 4 * size}, 2 * gathered_bytes * size
    assert axis_bytes(ops, "forward") == {"all_gather": gathered, **summed}
    assert axis_bytes(ops, "backward") == {"all_gather": 2 * gathered, **summed}


def test_tensor_parallel_all_reduces_shoeybi_figure_4() -> None:
    payload = 2 * 2048 * GPT3.hidden
    ops = block(GPT3, Cut(microbatch=1, seq=2048, tp=8))
    assert axis_bytes(ops, "forward") == axis_bytes(ops, "backward") == {"all_reduce": 2 * payload}


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    ulysses=st.sampled_from([1, 2, 4]),
    ring=st.sampled_from([1, 2, 4]),
    sp=st.booleans(),
    flash=st.booleans(),
    name=st.sampled_from(["gpt3-175b", "llama3-70b", "deepseek-v3", "mixtral-8x7b", "qwen3-30b-a3b"]),
    dtype=st.sampled_from(["bf16", "fp8", "fp32"]),
)
def test_cutting_keeps_the_flop(
    tp: int, ulysses: int, ring: int, sp: bool, flash: bool, name: str, dtype: str
) -> None:
    """The ranks of a tensor x context group do together what one rank does alone."""
    model = replace(find_model(name), num_kv_heads=find_model(name).num_heads)  # no copies of key heads
    cut = Cut(microbatch=2.0, seq=4096.0, flash=flash, precision=precision(dtype))
    many = replace(cut, tp=tp, ulysses=ulysses, ring=ring, sequence_parallel=sp)
    if model.mla and not sp:  # without it every rank computes the whole latent
        many = replace(many, sequence_parallel=True)
    for phase in ("forward", "backward"):
        together = flop(block(model, many), phase=phase) * tp * ulysses * ring
        assert together == pytest.approx(flop(block(model, cut), phase=phase), rel=1e-12)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 50))
def test_attended_pairs_against_counting(seq_q: int, cached: int, window: int) -> None:
    """The closed form counts half of the diagonal; a loop over queries counts it whole."""
    seq_k = seq_q + cached
    whole = attended_pairs(seq_q, seq_k, causal=True)
    visible = [cached + i + 0.5 for i in range(seq_q)]
    assert whole == pytest.approx(sum(visible))
    if window:
        cut = attended_pairs(seq_q, seq_k, causal=True, window=window)
        assert cut <= whole
        assert cut >= sum(min(keys, window) - 0.5 for keys in visible) - 0.5 * seq_q


def test_expert_parallelism_sends_each_token_k_times_and_back() -> None:
    model = find_model("mixtral-8x7b")
    cut = Cut(microbatch=1.0, seq=4096.0, ep=8.0)
    ops = [op for op in block(model, cut, Layer(moe=True)) if op.axis == "ep"]
    assert [op.collective for op in ops] == ["all_to_all"] * 4
    assert {op.payload_bytes for op in ops} == {2 * 4096 * model.hidden * 2}
    matmuls = [op for op in block(model, cut, Layer(moe=True)) if op.kind == "matmul"]
    shape = next(op.shape for op in matmuls if op.name == "expert_fc1")
    assert shape == (1.0, 2 * 4096.0 * 8 / 8, 2 * 14336.0, 4096.0)


# --- implementations -----------------------------------------------------------------------------

SPELLED, BLOCK = table("tiny_families"), table("tables")["block"]


def tiny(family: str) -> Model:
    config = SPELLED.get(family, SPELLED["tiny"]) | {"model_type": family, "sliding_window": None}
    return model_from_config(config, name="tiny")


@pytest.mark.parametrize(("family", "flash", "kept"), BLOCK["kept_by_transformers"])
def test_bytes_kept_by_transformers_5_23(family: str, flash: bool, kept: int) -> None:
    """Storages that autograd holds for one more layer, 2 sequences of 64 tokens, bf16, PyTorch on a CPU.

    There the mean and the deviation of a LayerNorm with weights are bf16, on a GPU they are fp32.
    """
    model = replace(tiny(family), dropout_frac=0.0)
    cut = Cut(microbatch=2.0, seq=64.0, flash=flash, implementation="huggingface")
    narrow = 2 * 64 * 2 * 2.0 * model.num_norms * (model.norm == "layernorm" and model.norm_weight)
    ops = with_saved_bytes(block(model, cut, Layer(moe=model.moe is not None)))
    assert total(ops, "saved_bytes") == kept + narrow


@pytest.mark.parametrize(("family", "what"), BLOCK["unknown_to_transformers"])
def test_bytes_that_transformers_keeps_are_known_or_refused(family: str, what: str) -> None:
    with pytest.raises(PlanError, match=f"what transformers keeps of {what}"):
        mw.estimate(tiny(family), "h100-80g-sxm:1", "implementation=huggingface", seq=64)


def test_modules_of_transformers_are_eager_under_any_implementation() -> None:
    """Of a tiny model, where the host is all that counts: 8 kernels for RMSNorm, 10 for rotary positions."""
    plans = ("megatron,software=torch-2023", "huggingface", "megatron,software=torch-2024-eager")
    fused, eager, same, with_liger = (
        mw.estimate(tiny("llama"), "h100-80g-sxm:1", f"implementation={one}", seq=64)
        for one in (*plans, "huggingface,loss_fusion=kernels")
    )
    assert with_liger.step_s == pytest.approx(fused.step_s, rel=0.1)
    assert eager.step_s / fused.step_s == pytest.approx(3.0, rel=0.2)
    assert same.step_s == eager.step_s and same.memory_bytes == eager.memory_bytes


def test_a_fused_softmax_takes_multiples_of_four_matrices() -> None:
    """Megatron-LM's fused_softmax.py: of GPT-3's 96 heads tp=16 leaves six; torch's takes any number."""
    cut = Cut(microbatch=1, seq=2048, flash=False, implementation="megatron")
    for tp, implementation, launches in ((8, "megatron", 0), (16, "megatron", 8), (16, "fsdp2", 0)):
        ops = block(GPT3, replace(cut, tp=tp, implementation=implementation))
        assert total(ops, "launches", name="softmax_steps") == launches


# --- parallel blocks -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_norms", [1, 2])
@pytest.mark.parametrize("sp", [False, True])
def test_a_parallel_block_pays_one_pair_of_exchanges(num_norms: int, sp: bool) -> None:
    """GPT-NeoX: `x + attn(ln1(x)) + mlp(ln2(x))` needs an exchange where it begins and one where it ends."""
    model = replace(GPT3, parallel_block=True, num_norms=num_norms)
    cut = Cut(microbatch=1, seq=2048, tp=8, sequence_parallel=sp)
    ops, payload = block(model, cut), 2 * 2048 * GPT3.hidden
    pair = {"all_gather": payload, "reduce_scatter": payload} if sp else {"all_reduce": payload}
    assert axis_bytes(ops, "forward") == pair
    assert axis_bytes(ops, "backward") == pair | ({"all_gather": 2 * payload} if sp else {})


# --- what selective recomputation keeps and runs again ----------------------------------------------

MOE, DENSE = Layer(moe=True), Layer()


def forward(name: str, layer: Layer, **cut: Any) -> list[Op]:
    ops = block(find_model(name), Cut(**{"microbatch": 1.0, "seq": 4096.0} | cut), layer)
    return [op for op in ops if op.phase == "forward"]


def kept_mb(name: str, layer: Layer, *modules: str, **cut: Any) -> float:
    return float(activations(forward(name, layer, recompute_modules=modules, **cut)).kept_bytes) / 1e6


@pytest.mark.parametrize(("layer", "megabytes"), [(MOE, 1865.0), (DENSE, 1395.0)], ids=["moe", "dense"])
def test_deepseek_keeps_what_was_published(layer: Layer, megabytes: float) -> None:
    """NVIDIA-NeMo/Megatron-Bridge 067f987: activations of DeepSeek-V3 at 4,096 tokens, bf16, by tensor."""
    assert kept_mb("deepseek-v3", layer, ep=64.0) == pytest.approx(megabytes, rel=0.003)


def test_torchtitan_keeps_every_other_matmul() -> None:
    h, kv, f, heads = 4096, 1024, 14336, 32  # torchtitan b5bcd76, activation_checkpoint.py, Llama 3 8B
    for is_eager, num in ((True, 4), (False, 3)):  # compiled, the last result is not kept
        found = kept_mb("llama3-8b", DENSE, "per_op", seq=8192.0, is_eager=is_eager)
        assert found == pytest.approx(8192 * (2 * (num * h + kv + f) + 4 * heads) / 1e6)
    ops = forward("llama3-8b", DENSE, recompute_modules=("per_op",))
    again = {op.name: op.redone_frac for op in ops if op.kind != "collective"}
    assert (again["out_proj"], again["fc2"], again["flash"], again["fc1"]) == (1.0, 0.0, 0.0, 0.5)
    assert again["qkv"] == pytest.approx(kv / (h + 2 * kv))
    # Those of NVFP4 are no ops of its list (components/quantization/nvfp4.md: 34 GiB less of Qwen3 8B).
    narrow = forward("llama3-8b", DENSE, recompute_modules=("per_op",), precision=precision("fp4"))
    assert {op.redone_frac for op in narrow if op.kind == "matmul"} == {1.0}


def test_compiled_layers_of_one_input_cast_it_once() -> None:
    def casts(**cut: Any) -> list[tuple[float, ...]]:
        ops = block(find_model("llama3-8b"), Cut(microbatch=1, seq=2048, implementation="fsdp2", **cut))
        return [op.shape for op in ops if op.name == "qkv_cast" and op.phase == "forward"]

    assert casts(narrow_matmuls="fp8").count((2048, 4096)) == 1
    assert casts(narrow_matmuls="fp8", is_eager=True).count((2048, 4096)) == 3


@pytest.mark.parametrize(("software", "phases"), [("xla-2024", 2), ("megatron-2024", 0)])
def test_weights_are_cast_where_they_are_read_or_after_the_optimizer(software: str, phases: int) -> None:
    plan = f"zero=3,dtype=fp8,software={software}"
    rows = mw.estimate("llama3-8b", "h100-80g-sxm:8", plan, seq=2048).rank_ledger(0).to_json()
    casts = {row["phase"] for row in rows if (row["op"], row["shape"]) == ("fc2_cast", "14336x4096")}
    assert len(casts) == phases


def test_modules_drop_what_they_name() -> None:
    # Queries, keys and values of 128 heads, and the normed latents with their statistics, less the key that
    # all heads share, of which they are made; the input of the experts' second matmul: 8 copies 2,048 wide.
    whole = kept_mb("deepseek-v3", MOE, "core_attn", ep=64.0)
    for module, bytes_a_token in (
        ("mla_up_proj", 2 * (128 * (192 + 192 + 128) + 1536 + 512 + 4 - 64)),
        ("moe_act", 2 * 8 * 2048),
    ):
        less = kept_mb("deepseek-v3", MOE, "core_attn", module, ep=64.0)
        assert whole - less == pytest.approx(4096 * bytes_a_token / 1e6)
    assert kept_mb("deepseek-v3", MOE, "mlp") == kept_mb("deepseek-v3", MOE)  # only dense layers have an mlp
    assert kept_mb("llama3-8b", DENSE, "layernorm") == kept_mb("llama3-8b", DENSE)  # its norms are fused


def test_tokens_that_go_nowhere_go_alike() -> None:
    one, other = (
        mw.estimate("mixtral-8x7b", "gb200:16", f"dispatch={name}", batch=16, seq=4096).time_s
        for name in ("per_rank", "per_expert")
    )
    assert one == other


def test_dualpipe_with_experts_is_deepseeks_framework() -> None:
    plan = Plan(pp=16, ep=64, dtype="fp8", schedule="dualpipe")
    assert plan.overlap_ep and plan.dispatch == "per_rank" and plan.recompute == "selective"
    assert plan.dispatch_dtype == plan.act_input_dtype == "fp8"
    for key, value in (("overlap_ep", False), ("recompute", "none"), ("dispatch", "per_expert")):
        stated = replace(plan, **{key: value, "recompute_modules": ()})
        assert getattr(stated, key) == value and parse_plan(plan_text(stated)) == stated


def test_an_op_takes_as_long_whichever_are_timed_with_it() -> None:
    found = mw.estimate("deepseek-v3", "h800-sxm:64", "pp=2,ep=32,dispatch=per_rank", batch=64, seq=4096)
    rows = [row for part in found.step.of.by_part for row in part.rows if not row.is_wait]
    assert {row.op.name for row in rows if row.op.choices} == {"dispatch", "combine"}
    for row in rows:
        assert op_times([row.op], found.machine) == pytest.approx([row.time_s])


# --- recurrences in chunks ---------------------------------------------------------------------------

TIMES = csv_rows("recurrence_times.csv")


def chunk_ops(own: Recurrence, **cut: Any) -> dict[str, Op]:
    """The kernels of a recurrence in chunks, by phase."""
    model = replace(GPT3, recurrence=own, layers=(Layer(mixer="recurrence"),) * GPT3.num_layers)
    ops = block(model, Cut(microbatch=1.0, **cut), model.layers[0])
    return {op.phase: op for op in ops if op.name == "chunk"}


@pytest.mark.parametrize("tp", [1.0, 4.0])
def test_mamba_2_moves_what_each_of_its_kernels_reads_and_writes(tp: float) -> None:
    """The five kernels of `_mamba_chunk_scan_combined_fwd`, on a rank's heads and groups."""
    groups, heads, wide, deep, tokens, chunk = 8 / tp, 64 / tp, 64, 128, 8192, 128
    keys, values = 2 * tokens * groups * deep, 2 * tokens * heads * wide
    states, scores = 4 * (tokens / chunk) * heads * wide * deep, 4 * tokens * chunk * groups
    read = keys + values  # chunk state; the sums of decays are small
    read += states  # passing states on
    read += 2 * keys  # scores
    read += scores + values + keys + states / 2  # chunk scan, with states in 16 bits
    written = states + states / 2 + scores + values
    among, between = tokens * chunk * (groups * deep + heads * wide), 4 * tokens * heads * wide * deep
    own = Recurrence(kind="ssd", num_heads=64, head_dim=wide, num_groups=8, state_dim=deep)
    there, back = chunk_ops(own, seq=float(tokens), tp=tp).values()
    assert (there.cost.read_bytes, there.cost.write_bytes) == (read, written)
    assert there.cost.flop == among + between
    assert back.cost.flop == 3 * among + 2.5 * between  # makes scores and states again
    assert not there.keeps


def test_one_token_reads_and_writes_its_state_once() -> None:
    own = Recurrence(kind="delta", num_heads=32, head_dim=128, num_groups=16, state_dim=128)
    (op,) = chunk_ops(own, seq=1.0, kind="decode").values()
    state = 4 * 32 * 128 * 128
    assert op.cost.read_bytes == state + 2 * (2 * 16 + 32) * 128
    assert op.cost.write_bytes == state + 2 * 32 * 128


@pytest.mark.parametrize("row", TIMES, ids=lambda row: "-".join(list(row.values())[:9]))
def test_chunks_take_the_time_that_was_published(row: dict[str, str]) -> None:
    """Within 40 %; as matmuls that read their inputs once they were up to 89 % too quick."""
    names = {"num_heads": "heads", "head_dim": "head_dim", "num_groups": "groups", "state_dim": "key_dim"}
    sizes: dict[str, Any] = {name: int(row[column]) for name, column in names.items()}
    kind = row["kind"].removeprefix("wide ")
    own = Recurrence(kind=kind, wide_decay=kind != row["kind"], **sizes)
    ops = chunk_ops(own, seq=float(row["tokens"]))
    runs_on = machine(mw.find_cluster(f"{row['chip']}:1"), "bf16")
    wanted = [op for phase, op in ops.items() if row["phase"] in (phase, "both")]
    assert 1e3 * sum(op_times(wanted, runs_on)) == pytest.approx(float(row["ms"]), rel=0.4)


# --- what is alive follows from the ops, by brute force ---------------------------------------------

TENSOR_SIZES = st.lists(st.integers(0, 100), min_size=1, max_size=12)


@st.composite
def programs(draw: st.DrawFn) -> list[Op]:
    """Kernels that each read some tensors made before; some read views."""
    script = Script(module="m", dtype="fp32")
    made: list[Tensor] = []
    for i, size in enumerate(draw(TENSOR_SIZES)):
        reads = draw(st.lists(st.sampled_from(made), max_size=3, unique=True)) if made else []
        reads = [each.view("view", 1) if draw(st.booleans()) else each for each in reads]
        made.append(script.kernel(f"op {i}", (size,), reads))
    return script.events


def alive_at(events: list[Op], place: int) -> float:
    """Bytes of all tensors that are made up to this event and read at it or later, or made at it."""
    total = 0.0
    for i, event in enumerate(events[: place + 1]):
        for tensor in event.makes:
            is_read = any(each.memory is tensor for later in events[place:] for each in later.reads)
            total += float(tensor.bytes) if i == place or is_read else 0.0
    return total


@given(programs())
def test_alive_is_made_before_and_read_later(events: list[Op]) -> None:
    tape = Tape("estimate")
    play(events, tape)
    expected = [alive_at(events, i) for i in range(len(events))]
    assert [row["live_bytes"] for row in tape._rows] == expected
    assert tape.peak_bytes == peak_bytes(events) == max(expected)
