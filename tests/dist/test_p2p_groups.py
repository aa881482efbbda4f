"""Every point-to-point message of a pipeline or a context-parallel roll runs inside its own group."""

import contextlib
import logging
import types

import pytest

from tests.dist.world import parallel


class Touched(AssertionError):
    """A point-to-point call named no group, or the group of all ranks."""


@contextlib.contextmanager
def world_untouched():
    """Refuse point-to-point calls on WORLD; yields the calls made: (kind, peer, description of the group).

    Every rank of the world enters and leaves. Work handles live until all have left: gloo drops a message
    whose handle is gone, and the schedules let go of their last ones.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    calls, real, works = [], {}, []

    def guard(name):
        def call(tensor, peer=None, group=None, *args, **kwargs):
            peer = kwargs.pop("dst", kwargs.pop("src", peer))
            if group is None or group is dist.group.WORLD:
                raise Touched(f"{name} on the group of all ranks")
            if peer is None:  # a batched operation names its peer within the group
                peer = dist.get_global_rank(group, kwargs.pop("group_dst", kwargs.pop("group_src", None)))
            calls.append((name, peer, group.group_desc))
            works.append(real[name](tensor, peer, group, *args, **kwargs))
            return works[-1]

        return call

    for name in ("isend", "irecv", "send", "recv"):
        real[name] = getattr(c10d, name)
        guarded = guard(name)  # one for both modules: P2POp compares its function with c10d's
        for module in (dist, c10d):
            setattr(module, name, guarded)
    try:
        yield calls
        dist.barrier()
    finally:
        for name, function in real.items():
            for module in (dist, c10d):
                setattr(module, name, function)


def train(pp=1, vpp=None, batches=4, **model):
    """Losses of three steps, and the calls; ``batches`` micro-batches a step."""
    from tests.dist import small_gpt

    with parallel(pp=pp, vpp=vpp):
        cfg = small_gpt.config(**model)
        run = small_gpt.Trainer(cfg, small_gpt.build(cfg))
        with world_untouched() as calls:
            losses = []
            for _ in range(3):
                losses.append(run.backward(small_gpt.tokens(batches)))
                run.optimizer.step()
    return None if losses[0] is None else losses, calls


PP2, OVERLAP = "PIPELINE_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_OVERLAP_GROUP"
SHAPES = "PIPELINE_MODEL_PARALLEL_SHAPE_GROUP"
SEPARATE = dict(overlap_p2p_comm=True)
LAYOUTS = {
    "pp2": dict(pp=2),
    "pp2-batched": dict(pp=2, batch_p2p_comm=True),
    "pp2-vpp2": dict(pp=2, vpp=2),
    "pp2-vpp2-overlap": dict(pp=2, vpp=2, **SEPARATE),
    "pp2-vpp2-overlap-warmup": dict(pp=2, vpp=2, overlap_p2p_comm_warmup_flush=True, **SEPARATE),
    "pp4": dict(pp=4),
    "pp4-batched": dict(pp=4, batch_p2p_comm=True),
    "pp2-mtp": dict(pp=2, mtp_num_layers=1),
}


@pytest.fixture(scope="module")
def one_stage(world):
    found = {}

    def losses(**model):
        key = tuple(sorted(model.items()))
        if key not in found:
            [(found[key], calls)] = world(1, train, **model)
            assert calls == []
        return found[key]

    return losses


@pytest.mark.parametrize("name", LAYOUTS)
def test_pipeline_stays_inside_its_group(world, one_stage, name):
    layout = LAYOUTS[name]
    stages = layout["pp"]
    results = world(stages, train, **layout)
    expected = one_stage(**{k: v for k, v in layout.items() if k == "mtp_num_layers"})
    assert results[-1][0] == pytest.approx(expected, rel=2e-6)
    assert expected[2] < expected[0] - 0.02
    for rank, (_, calls) in enumerate(results):
        assert {group for _, _, group in calls} == ({PP2, OVERLAP} if name in TWO_WAY else {PP2})
        assert {peer for _, peer, _ in calls} <= {(rank + 1) % stages, (rank - 1) % stages}
        if name in TWO_WAY:  # one communicator for each direction
            assert {(kind, group) for kind, _, group in calls} == (
                {("isend", PP2), ("irecv", OVERLAP)} if rank == 0 else {("irecv", PP2), ("isend", OVERLAP)}
            )


TWO_WAY = {"pp2", "pp2-vpp2", "pp2-vpp2-overlap", "pp2-vpp2-overlap-warmup", "pp2-mtp"}


def own_collection(pipeline, with_overlap_group, vpp=None, **model):
    """A pipeline on some ranks of WORLD, in groups that the caller made; the others only help to make them.

    Loss and gradients by global name, those of a single stage, the calls and the warnings.
    """
    import torch
    import torch.distributed as dist

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_groups import create_companion_groups
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from tests.dist import small_gpt

    def run(group, embedding, chunks):
        stages, stage = group.size(), group.rank()
        groups = ProcessGroupCollection(
            **dict.fromkeys(("tp", "cp", "ep", "expt_tp", "tp_ep", "dp", "dp_cp", "tp_cp", "expt_dp"), alone),
            pp=group, embd=embedding, pos_embd=embedding,
        )
        cfg = small_gpt.config(
            pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=chunks, **model)
        models = []
        for i in range(chunks or 1):
            spec = get_gpt_decoder_block_spec(
                cfg, use_transformer_engine=False, vp_stage=i if chunks else None, pp_rank=stage)
            models.append(GPTModel(
                cfg, spec, small_gpt.VOCAB, max_sequence_length=64, vp_stage=i if chunks else None,
                pre_process=stage == i == 0, post_process=(stage, i) == (stages - 1, (chunks or 1) - 1),
                share_embeddings_and_output_weights=False, position_embedding_type="rope",
                pg_collection=groups))
            small_gpt.fill(models[-1])
        schedule = schedules.forward_backward_no_pipelining if stages == 1 else (
            schedules.forward_backward_pipelining_with_interleaving if chunks
            else schedules.forward_backward_pipelining_without_interleaving)
        generator = torch.Generator().manual_seed(5)
        batches = [torch.randint(0, small_gpt.VOCAB, (2, small_gpt.SEQUENCE), generator=generator)
                   for _ in range(4)]
        losses = schedule(
            forward_step_func=small_gpt.causal_step, model=models if chunks else models[0],
            data_iterator=[iter(batches) for _ in models] if chunks else iter(batches),
            num_microbatches=4, seq_length=small_gpt.SEQUENCE, micro_batch_size=2,
            p2p_communicator=P2PCommunicator(group, cfg), pg_collection=groups)
        gradients = {n: p.grad for m in models for n, p in small_gpt.global_names(m).items()}
        return sum(float(entry["loss"]) for entry in losses) / 4 if losses else None, gradients

    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("megatron.core.pipeline_groups").addHandler(handler)
    try:
        with parallel():
            rank = dist.get_rank()
            alone = [dist.new_group([r], group_desc="ALONE") for r in range(dist.get_world_size())][rank]
            pp_group = dist.new_group(pipeline, group_desc=PP2)
            embedding = dist.new_group(pipeline, group_desc="EMBEDDING_GROUP")
            if with_overlap_group:
                create_companion_groups(pp_group, pipeline)
            expected_loss, expected = run(alone, alone, None)
            with world_untouched() as calls:
                loss, gradients = run(pp_group, embedding, vpp) if rank in pipeline else (None, {})
    finally:
        logging.getLogger("megatron.core.pipeline_groups").removeHandler(handler)
    worst = max(
        (float((g - expected[n]).abs().max() / expected[n].abs().max()) for n, g in gradients.items()),
        default=0.0)
    return types.SimpleNamespace(loss=loss, expected_loss=expected_loss, worst=worst, names=list(gradients),
                                 all=sorted(expected), calls=calls, warnings=warnings)


SCHEDULES = {
    "pp2": {},
    "vpp2": dict(vpp=2),
    "vpp2-overlap": dict(vpp=2, **SEPARATE),
    "vpp2-overlap-warmup": dict(vpp=2, overlap_p2p_comm_warmup_flush=True, **SEPARATE),
}


MADE = [(name, with_overlap_group) for name in SCHEDULES for with_overlap_group in (True, False)]
MADE.remove(("vpp2-overlap-warmup", False))


@pytest.mark.parametrize("name, with_overlap_group", MADE)
def test_callers_own_groups_among_foreign_ranks(world, name, with_overlap_group):
    """Ranks 2 and 3 of four are the pipeline."""
    results = world(4, own_collection, [2, 3], with_overlap_group, **SCHEDULES[name])
    first, last = results[2], results[3]
    assert results[0].calls == results[1].calls == []
    assert last.loss == pytest.approx(last.expected_loss, rel=1e-6)
    assert first.worst < 1e-5 and last.worst < 1e-5
    assert sorted(first.names + last.names) == first.all
    for stage in (first, last):
        assert {group for _, _, group in stage.calls} == ({PP2, OVERLAP} if with_overlap_group else {PP2})
        assert len(stage.warnings) == (0 if with_overlap_group else 1)
        assert all("create_companion_groups" in text for text in stage.warnings)
    assert_mirrored(first.calls, last.calls)


def assert_mirrored(first, last):
    """On each communicator every message meets its counterpart in order: else NCCL waits for ever."""
    for group in (PP2, OVERLAP):
        sent = [kind for kind, _, g in first if g == group]
        met = [{"isend": "irecv", "irecv": "isend"}[kind] for kind, _, g in last if g == group]
        assert sent == met


def test_overlapped_warmup_needs_the_second_communicator(world):
    message = (r"RuntimeError: overlap_p2p_comm_warmup_flush on a two-stage pipeline "
               r"needs a second communicator: call .*create_companion_groups")
    with pytest.raises(RuntimeError, match=message):
        world(4, own_collection, [2, 3], False, **SCHEDULES["vpp2-overlap-warmup"])


def varied_lengths(count, pp=1, vpp=None, gloo=True, **model):
    """Loss, gradient norm and calls of one step; every one of `count` micro-batches has another length."""
    import torch

    from megatron.core import pipeline_groups
    from tests.dist import small_gpt

    def step(iterator, chunk):
        batch = next(iterator)
        n = batch.shape[1]
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)[None, None]
        out = chunk(batch, torch.arange(n)[None].expand(2, -1), mask, labels=torch.roll(batch, -1, 1))
        return out, lambda loss: (loss.mean(), {"loss": loss.detach().mean()})

    with parallel(pp=pp, vpp=vpp):
        if not gloo:
            pipeline_groups._SHAPE_CHANNELS.clear()
        cfg = small_gpt.config(
            variable_seq_lengths=pp > 1, moe_token_dispatcher_type="alltoall", **model)
        run = small_gpt.Trainer(cfg, small_gpt.build(cfg))
        batches = [b[:, : 23 - 4 * i] for i, b in enumerate(small_gpt.tokens(count))]
        with world_untouched() as calls:
            loss = run.backward(batches, step)
        _, norm, _ = run.optimizer.step()
    return loss, float(norm), calls


VARIED = ["pp2", "pp2-vpp2", "pp2-vpp2-overlap", "pp2-vpp2-overlap-warmup", "pp4"]


# With as many micro-batches as stages, the first one runs all of them forward before any backward pass.
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", VARIED)
def test_variable_lengths(world, name, count):
    """Every tensor's shape goes ahead of it, on the CPU, and neither direction waits for the other."""
    [(loss, norm, _)] = world(1, varied_lengths, count)
    results = world(LAYOUTS[name]["pp"], varied_lengths, count, timeout=60, **LAYOUTS[name])
    assert results[-1][0] == pytest.approx(loss, rel=1e-6)
    for _, its_norm, calls in results:
        assert its_norm == pytest.approx(norm, rel=1e-5)
        sent = [group for kind, _, group in calls if kind == "isend"]
        assert sent.count(SHAPES) == len(sent) / 2 > 0  # the other half are the tensors
    if name != "pp4":
        assert_mirrored(results[0][2], results[1][2])


def test_variable_lengths_without_gloo(world):
    """Then the tensors' communicator carries the shapes, as upstream's does."""
    [(loss, norm, _)] = world(1, varied_lengths, 4)
    results = world(2, varied_lengths, 4, gloo=False, timeout=60, pp=2, vpp=2)
    assert results[1][0] == pytest.approx(loss, rel=1e-6)
    assert results[0][1] == results[1][1] == pytest.approx(norm, rel=1e-5)
    assert {group for _, _, calls in results for _, _, group in calls} == {PP2, OVERLAP}


def test_variable_lengths_in_overlapped_warmup_need_gloo(world):
    message = (r"RuntimeError: overlap_p2p_comm_warmup_flush with variable sequence lengths needs a gloo "
               r"group for their shapes: leave create_gloo_process_groups at True .*create_companion_groups")
    with pytest.raises(RuntimeError, match=message):
        world(2, varied_lengths, 4, gloo=False, **LAYOUTS["pp2-vpp2-overlap-warmup"])


def shapes_ahead(most):
    """The first stage sends 50 shapes, which the last one takes, and then the other way round."""
    import torch
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.core.pipeline_groups import ShapeChannel, shape_channel

    usual = ShapeChannel.MOST_UNDELIVERED
    ShapeChannel.MOST_UNDELIVERED = most or usual
    try:
        with parallel(pp=2):
            channel = shape_channel(parallel_state.get_pipeline_model_parallel_group())
            tensors, got, kept = [torch.empty(i, 2, 3) for i in range(50)], [], 0
            first = parallel_state.is_pipeline_first_stage()
            for sending in (first, not first):
                for tensor in tensors if sending else ():
                    channel.exchange(tensor if first else None, None if first else tensor, False, False)
                    kept = max(kept, len(channel._sent))
                if not most:  # nobody has asked for a shape yet
                    dist.barrier()
                for _ in tensors if not sending else ():
                    from_previous, from_next = channel.exchange(None, None, not first, first)
                    got.append(from_next if first else from_previous)
                    assert (from_previous if first else from_next) == [0, 0, 0]
                dist.barrier()
            return got, kept
    finally:
        ShapeChannel.MOST_UNDELIVERED = usual


@pytest.mark.parametrize("most", [None, 4])
def test_shapes_wait_for_no_receiver_and_are_let_go(world, most):
    for got, kept in world(2, shapes_ahead, most, timeout=60):
        assert got == [[i, 2, 3] for i in range(50)]
        assert kept == (most or 50)


def batched(forward_only, **layout):
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from tests.dist import small_gpt

    vpp = layout.get("vpp")
    with parallel(**layout):
        cfg = small_gpt.config(batch_p2p_comm=True)
        chunks = small_gpt.build(cfg)
        with world_untouched():
            losses = get_forward_backward_func()(
                forward_step_func=small_gpt.causal_step, model=chunks if vpp else chunks[0],
                data_iterator=[iter(small_gpt.tokens()) for _ in chunks] if vpp else iter(small_gpt.tokens()),
                num_microbatches=4, seq_length=small_gpt.SEQUENCE, micro_batch_size=2,
                forward_only=forward_only)
    return [float(entry["loss"]) for entry in losses]


def test_two_stages_interleaved_and_batched_is_an_error(world):
    with pytest.raises(RuntimeError, match=r"ValueError: batch_p2p_comm=True cannot be used with virtual_pipe"
                                           r"line_model_parallel_size on pipeline_model_parallel_size=2: .*"
                                           r"set batch_p2p_comm=False"):
        world(2, batched, forward_only=False, pp=2, vpp=2)


def test_two_stages_interleaved_and_batched_may_evaluate(world):
    [expected] = world(1, batched, forward_only=True)
    assert world(2, batched, forward_only=True, pp=2, vpp=2)[1] == pytest.approx(expected, rel=1e-6)


def companion_groups():
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.pipeline_groups import _OVERLAP_GROUPS, _SHAPE_CHANNELS, overlap_group, shape_channel

    def ranks_of_companions(group):
        """(ranks of the second communicator, of the group for shapes), None for one that there is not."""
        channel = shape_channel(group)
        found = [overlap_group(group) if group in _OVERLAP_GROUPS else None, channel and channel.group]
        for companion in filter(None, found):
            assert companion not in (group, dist.group.WORLD)
            assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(companion)
        return [companion and dist.get_process_group_ranks(companion) for companion in found]

    seen = []
    for stages, gloo in ((2, True), (4, True), (2, False), (1, True)):
        with parallel(pp=stages, create_gloo_process_groups=gloo):
            seen.append(ranks_of_companions(parallel_state.get_pipeline_model_parallel_group()))
    for shape in ([2, 2], [1, 4]):
        groups = len(dist.distributed_c10d._world.pg_map)
        grid = HyperCommGrid(shape, ["tp", "pp"])
        assert ranks_of_companions(grid.create_pg("tp")) == [None, None]
        seen.append(ranks_of_companions(grid.create_pg("pp")))
        grid.destroy()
        assert len(dist.distributed_c10d._world.pg_map) == groups
    return seen, len(_OVERLAP_GROUPS), len(_SHAPE_CHANNELS)


def test_companion_groups_come_and_go_with_their_pipeline(world):
    for rank, (seen, *left) in enumerate(world(4, companion_groups)):
        pair, all_four = [rank % 2, rank % 2 + 2], [0, 1, 2, 3]
        made = [[pair, pair], [None, all_four], [pair, None], [None, None]]
        assert seen == [*made, *made[:2]]
        assert left == [0, 0]


def test_which_companions_are_made(monkeypatch):
    import torch.distributed as dist

    from megatron.core.pipeline_groups import create_companion_groups

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)  # which belongs to none and helps to make them
    made = []

    def new_group(ranks, **options):
        made.append((ranks, options))

    def second(**options):
        return dict(group_desc=OVERLAP, **options)

    def shapes(**options):
        return dict(group_desc=SHAPES, backend="gloo", pg_options=None, **options)

    def expect(ranks, given, *expected):
        made.clear()
        create_companion_groups(None, ranks, new_group, **given)
        assert made == [(ranks, options) for options in expected]

    expect([0], {})
    expect([0, 1], dict(timeout=7, backend="nccl"), second(timeout=7, backend="nccl"), shapes(timeout=7))
    expect([0, 1], dict(backend="ucc"), shapes())  # where one communicator does
    expect([0, 1, 2], {}, shapes())
    expect([0, 1], dict(gloo=False), second())
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    expect([0, 1], {}, second())
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    expect([0, 1], {})


def rolls():
    """roll_tensor over two context-parallel ranks, of two replicas, beside the roll of the whole."""
    import torch
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    with parallel(cp=2):
        group, rank = parallel_state.get_context_parallel_group(), parallel_state.get_context_parallel_rank()
        assert group.size() == 2 and dist.get_world_size() == 4

        def mine(full):  # chunks r and 3 - r of four
            chunks = full.chunk(4, -1)
            return torch.cat([chunks[rank], chunks[3 - rank]], -1)

        generator = torch.Generator().manual_seed(11)
        full = torch.randint(1, 99, (3, 20), generator=generator)
        with world_untouched() as calls:
            rolled, total = roll_tensor(mine(full), cp_group=group)
        whole, _ = roll_tensor(full)
        assert torch.equal(rolled, mine(whole)) and total == rolled.sum()

        ends = torch.tensor([0, 8, 20])
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        local = torch.cat([mine(full[:, :8]), mine(full[:, 8:])], -1)
        with world_untouched() as packed_calls:
            rolled, _ = roll_tensor(local, cp_group=group, packed_seq_params=packed)
        whole, _ = roll_tensor(full, packed_seq_params=packed)
        assert torch.equal(rolled, torch.cat([mine(whole[:, :8]), mine(whole[:, 8:])], -1))
    return calls, packed_calls


def test_context_parallel_rolls_stay_inside_their_group(world):
    for rank, (calls, packed_calls) in enumerate(world(4, rolls)):
        other = rank ^ 1
        kinds = [("isend", "irecv"), ("irecv", "isend")][rank % 2 == 0]
        assert calls == [(kind, other, "CONTEXT_PARALLEL_GROUP") for kind in kinds]
        assert packed_calls == 2 * calls


def inference_transfer(name_the_group):
    import torch

    from megatron.core import parallel_state
    from megatron.core.inference.communication_utils import (
        recv_from_prev_pipeline_rank_,
        send_to_next_pipeline_rank,
    )

    with parallel(pp=2), world_untouched() as calls:
        group = parallel_state.get_pipeline_model_parallel_group() if name_the_group else None
        buffer = torch.full((3, 5), float("nan"))
        if parallel_state.is_pipeline_first_stage():
            send_to_next_pipeline_rank(torch.arange(15.0).view(3, 5), group)
            return calls, None
        recv_from_prev_pipeline_rank_(buffer, group)
        return calls, buffer.flatten().tolist()


@pytest.mark.parametrize("name_the_group", [True, False])
def test_inference_transfers_stay_inside_their_group(world, name_the_group):
    results = world(4, inference_transfer, name_the_group)
    for rank in (0, 1):
        assert results[rank] == ([("isend", rank + 2, PP2)], None)
        assert results[rank + 2] == ([("irecv", rank, PP2)], [float(i) for i in range(15)])
