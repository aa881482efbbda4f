"""The tiling proof against counting every element, and the pieces against plain slicing of a full tensor."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.param_export.families.family import Family, Rule
from megatron.core.param_export.members import Content, Member, Position, asymmetries
from megatron.core.param_export.pieces import Place, Span, dense, glu, grouped_query
from megatron.core.param_export.schedule import _widest
from megatron.core.param_export.tiling import faults
from megatron.weight_sync import Box


def count_by_element(shape, boxes):
    count = np.zeros(int(np.prod(shape)), dtype=int)
    for offset, sizes, strides in boxes:
        for steps in itertools.product(*(range(n) for n in sizes)):
            count[offset + sum(i * s for i, s in zip(steps, strides, strict=True))] += 1
    return count


@st.composite
def cut_tensors(draw):
    """A tensor cut into boxes (rows, columns, interleaved, blocks), one of which may then be damaged."""
    rows, columns = draw(st.integers(1, 6)) * 2, draw(st.integers(1, 5)) * 3
    kind = draw(st.sampled_from(["rows", "columns", "interleaved", "blocks"]))
    if kind == "rows":
        boxes = [(k * columns, (rows // 2, columns), (2 * columns, 1)) for k in range(2)]
    elif kind == "columns":
        boxes = [(k * columns // 3, (rows, columns // 3), (columns, 1)) for k in range(3)]
    elif kind == "interleaved":
        boxes = [(k, (rows, columns // 3), (columns, 3)) for k in range(3)]
    else:
        half = rows // 2 * columns
        boxes = [(k * half, (rows // 2, columns), (columns, 1)) for k in range(2)]
    damage = draw(st.sampled_from(["none", "drop", "repeat", "shift", "shrink"]))
    victim = draw(st.integers(0, len(boxes) - 1))
    offset, sizes, strides = boxes[victim]
    if damage == "drop":
        del boxes[victim]
    elif damage == "repeat":
        boxes.append(boxes[victim])
    elif damage == "shift":
        boxes[victim] = (offset + draw(st.integers(1, columns)), sizes, strides)
    elif damage == "shrink":
        boxes[victim] = (offset, (max(1, sizes[0] - 1), sizes[1]), strides)
    return (rows, columns), boxes


@settings(max_examples=300, deadline=None)
@given(cut_tensors())
def test_faults_agree_with_counting(case):
    shape, boxes = case
    found = faults(shape, boxes)
    if any(fault.kind == "outside" for fault in found):
        return  # such a box crosses the end of a row or of the tensor; counting has no notion of that
    count = count_by_element(shape, boxes)
    assert bool(found) == bool((count != 1).any())
    for fault in found:
        flat = int(np.ravel_multi_index(fault.index, shape))
        assert (count[flat] == 0) == (fault.kind == "gap") and count[flat] == len(fault.boxes)


def test_a_box_outside_the_tensor_is_a_fault():
    assert [f.kind for f in faults((4, 6), [(0, (5, 6), (6, 1))])] == ["outside", "gap"]
    assert [f.kind for f in faults((4, 6), [(0, (4, 6), (6, 1)), (24, (1, 1), (6, 1))])] == ["outside"]
    assert [f.kind for f in faults((4, 6), [(3, (4, 6), (6, 1))])] == ["outside", "gap"]


def test_a_box_that_meets_itself_is_an_overlap():
    assert [f.kind for f in faults((8,), [(0, (4, 4), (1, 1)), (7, (1,), (1,))])] == ["overlap"]


def test_large_tensors_need_no_memory_of_their_size():
    import tracemalloc

    shape = (128, 2880, 5760)  # 2.1e9 elements
    e, c, r = 2880 * 5760, 5760, 2
    boxes = [
        (expert * e + half + shard * 1440 * r, (2880, 1440), (c, r))
        for expert in range(128)
        for half in range(2)
        for shard in range(2)
    ]
    tracemalloc.start()
    assert faults(shape, boxes) == []
    assert [f.index for f in faults(shape, boxes[:-1])] == [(127, 0, 2881)]
    assert tracemalloc.get_traced_memory()[1] < 16e6
    tracemalloc.stop()


class Config:
    num_hidden_layers = 2


def family(*rules):
    return Family("test", "Test", lambda config: {"ffn": 6, "hidden": 5, "experts": 3}, rules).bind(Config)


def place_all(bound, shards, name, shape):
    """Copy (local tensor, pieces) shards into one full tensor of NaN."""
    full = torch.full(shape, float("nan")).view(-1)
    for local, pieces in shards:
        for piece in pieces:
            for box, box_shape in bound.boxes(piece):
                if box.full_name == name:
                    assert box_shape == tuple(shape)
                    box.copy_to_full(local.contiguous().view(-1), full)
    return full.view(shape)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("gated", [False, True])
def test_grouped_query_rows(ranks, gated):
    """Against slicing [group, heads per group + 2, head size, hidden]; 2 groups over up to 8 ranks."""
    heads, groups, head, hidden = 8, 2, 4, 3
    per = heads // groups
    full = torch.randn(groups, (per * (1 + gated) + 2), head, hidden)
    parts = {"q": full[:, :per], "k": full[:, -2], "v": full[:, -1]}
    if gated:
        parts["gate"] = full[:, per : 2 * per]
    shards = full.reshape(-1, hidden).chunk(ranks)
    for part, want in parts.items():
        want = want.reshape(-1, hidden)
        rows, cols = want.shape
        bound = family(Rule(f"attn.{part}.weight", "x", f"{rows} {cols}"))
        pieces = [
            (
                s,
                list(
                    grouped_query(
                        Place("layer", 0), "weight", heads, groups, head, Span.even(3), k, ranks, gated
                    )
                ),
            )
            for k, s in enumerate(shards)
        ]
        assert torch.equal(place_all(bound, pieces, "x", want.shape), want)


@pytest.mark.parametrize("interleave", [None, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gate_and_up(interleave, ranks):
    """Each rank: its gate rows then its up rows, or blocks of them in turn."""
    gate, up = torch.randn(6, 5), torch.randn(6, 5)
    shards = []
    for k in range(ranks):
        g, u = gate.chunk(ranks)[k], up.chunk(ranks)[k]
        if interleave:
            blocks = zip(g.split(interleave), u.split(interleave), strict=True)
            local = torch.cat([block for pair in blocks for block in pair])
        else:
            local = torch.cat([g, u])
        rows = Span.even(6 // ranks, k, ranks)
        shards.append((local, list(glu(Place("layer", 1, 2), ("g", "u"), rows, Span.even(5), interleave))))
    plain = family(
        Rule("g", "{layer}.{expert}.gate", "ffn hidden"), Rule("u", "{layer}.{expert}.up", "ffn hidden")
    )
    assert torch.equal(place_all(plain, shards, "1.2.gate", (6, 5)), gate)
    assert torch.equal(place_all(plain, shards, "1.2.up", (6, 5)), up)
    # one transposed tensor for all experts in which gate and up columns alternate
    fused = family(
        Rule("g", "gate_up", "experts hidden 2*ffn", "e c 2*r"),
        Rule("u", "gate_up", "experts hidden 2*ffn", "e c 2*r+1"),
    )
    want = torch.stack([gate.T, up.T], -1).reshape(5, 12)
    full = place_all(fused, shards, "gate_up", (3, 5, 12))
    assert torch.equal(full[2], want) and full[:2].isnan().all()


def test_an_interleave_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="gate: 6 rows per rank do not divide into blocks of 4"):
        list(glu(Place(), ("gate", "up"), Span.even(6), Span.even(5), 4))


def test_rows_that_do_not_divide_over_the_ranks_are_refused():
    with pytest.raises(ValueError, match=r"attn.qkv: 24 rows do not divide over 5 ranks"):
        list(grouped_query(Place(), "weight", 4, 1, 4, Span.even(3), 0, 5))


@pytest.mark.parametrize(
    "rule, message",
    [
        (Rule("w", "x", "ffn hidden", "r*c 0"), r"'r\*c': more than one axis in a term"),
        (Rule("w", "x", "ffn hidden", "e r c"), r"x: index 'e r c' does not fit shape 'ffn hidden'"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        family(rule).boxes(dense(Place(), "w", Span.even(6), Span.even(5)))


def test_a_configuration_without_a_field_that_the_table_reads_is_refused():
    from types import SimpleNamespace

    from megatron.core.param_export.families import family_of

    config = SimpleNamespace(model_type="mixtral", num_hidden_layers=2, hidden_size=8, vocab_size=9)
    vars(config).update(num_attention_heads=2, num_key_value_heads=2, intermediate_size=4)
    with pytest.raises(ValueError, match="SimpleNamespace has none of num_local_experts, num_experts"):
        family_of(config).bind(config)


def member(stage, pipeline, peers):
    content = Content((), {}, {}, ())
    gather = dict.fromkeys(("dense", "expert"), peers)
    return Member(Position(stage, pipeline, gather, {"dense": 0, "expert": 0}, "host"), content)


def test_pipeline_peers_must_stand_at_the_same_place():
    """Four ranks, two stages: the tensor-parallel group of the second one is turned round."""
    good = [member(k // 2, (k % 2, k % 2 + 2), (k // 2 * 2, k // 2 * 2 + 1)) for k in range(4)]
    assert asymmetries(good) == []
    turned = good[:2] + [member(1, (k % 2, k % 2 + 2), (3, 2)) for k in (2, 3)]
    assert "rank 0: its pipeline peer 2 stands elsewhere in its dense group" in asymmetries(turned)


def test_model_and_configuration_must_agree_on_the_shape():
    bound = family(Rule("w", "x", "ffn hidden"))
    with pytest.raises(ValueError, match=r"x: the configuration says \(6, 5\), but w has shape \(7, 5\)"):
        bound.boxes(dense(Place(), "w", Span.even(7), Span.even(5)))


def test_an_unknown_family_is_refused_by_name():
    from types import SimpleNamespace

    from megatron.core.param_export.families import family_of

    with pytest.raises(ValueError, match=r"no export family for model_type 'whisper'; known: .*qwen3"):
        family_of(SimpleNamespace(model_type="whisper"))
    with pytest.raises(ValueError, match=r"an object with model_type \(.*qwen3.*\), got dict"):
        family_of({"model_type": "qwen3"})


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_wide_units_move_the_same_elements(data):
    """A box of rows or of transposed columns, copied by elements and in the units that a schedule picks."""
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]))
    rows, cols, more = (
        data.draw(st.integers(1, 5)),
        data.draw(st.integers(1, 9)) * 2,
        data.draw(st.integers(0, 3)) * 2,
    )
    local = torch.arange(rows * cols + more).to(dtype)
    full = torch.full((2 * rows * (cols + more),), 7, dtype=dtype)
    if data.draw(st.booleans()):
        box = Box("x", (rows, cols), more, (cols, 1), rows * (cols + more), (cols + more, 1))
    else:
        box = Box("x", (rows, cols), more, (cols, 1), 0, (1, 2 * rows))
    want = full.clone()
    box.copy_to_full(local, want)
    unit, wide = _widest(box, local.numel(), full.numel(), dtype.itemsize)
    wide.copy_to_full(local.view(unit), full.view(unit))
    assert torch.equal(full, want)
    assert unit.itemsize * wide.numel == dtype.itemsize * box.numel


def test_aligned_rows_move_in_eights_of_bytes():
    box = Box("x", (3, 8), 16, (8, 1), 0, (64, 1))
    assert _widest(box, 40, 192, 2)[0] == torch.int64
    assert _widest(box, 40, 191, 2)[0] == torch.int16
