"""Shards over data-parallel ranks: the gathered changes against copies of the whole model."""

import pytest
import torch
import torch.distributed as dist

from tests.dist.small_optimizer import build, changed_since, snapshot, step
from tests.dist.world import parallel


def _follow(chunk, optimizer, diff, versions=3, **options):
    """Train, gather, apply what was gathered to a receiver's copy, compare; indices by version and name."""
    receiver = snapshot(chunk)
    found = []
    for version in range(versions):
        union = {name: set() for name in receiver}
        for seed in range(2):
            before = snapshot(chunk)
            step(chunk, optimizer, 10 * version + seed, density=0.03)
            for name, param in chunk.named_parameters():
                union[name] |= set(changed_since(before[name], param).tolist())
        diff.gather_changed(**options)
        found.append({})
        for name, param in chunk.named_parameters():
            indices, values = diff.changed(param)
            if param.dtype == torch.bfloat16 and param.requires_grad:
                assert indices.tolist() == sorted(union[name]), name
            assert torch.equal(indices, indices.unique()) and indices.dtype == torch.int64
            receiver[name].view(-1)[indices] = values
            assert torch.equal(receiver[name], param.detach()), name
            found[-1][name] = indices.tolist()
        diff.clear(version)
    return found


def _dp2(bucket_size):
    from megatron.core.optimizer.sparse_diff import attach

    with parallel():
        chunk, optimizer = build(bucket_size=bucket_size)
        diff = attach(optimizer)
        ranges = {e.name: (e.shard.start, e.shard.end) for e in diff}
        return ranges, _follow(chunk, optimizer, diff)


@pytest.mark.parametrize("bucket_size", [None, 200])
def test_shards_that_end_inside_a_tensor(world, bucket_size):
    (ranges_0, found_0), (ranges_1, found_1) = world(2, _dp2, bucket_size)
    assert found_0 == found_1
    assert sum(len(v) for v in found_0[0].values()) > 50
    trained = [n for n in ranges_0 if not n.endswith(("fixed", "counts"))]
    split = [n for n in trained if ranges_0[n][1] > ranges_0[n][0] and ranges_1[n][1] > ranges_1[n][0]]
    empty = [n for n in trained if ranges_0[n][1] == ranges_0[n][0] or ranges_1[n][1] == ranges_1[n][0]]
    assert split and empty  # a tensor split over both ranks, and one that a rank owns nothing of


def _to_one_rank():
    from megatron.core.optimizer.sparse_diff import attach

    with parallel():
        chunk, optimizer = build()
        diff = attach(optimizer)
        base = snapshot(chunk)
        step(chunk, optimizer, 1, density=0.1)
        param = chunk.module.second
        try:
            diff.changed(param)
        except RuntimeError as error:
            message = str(error)
        diff.gather_changed(dst=1)
        if dist.get_rank() == 1:
            indices, values = diff.changed(param)
            base_flat = base["module.second"].view(-1)
            base_flat[indices] = values
            return message, torch.equal(base_flat, param.detach().view(-1)), indices.numel()
        try:
            diff.changed(param)
        except RuntimeError as error:
            return message, str(error)


def test_gather_to_one_rank_and_its_errors(world):
    (before, other), (_, equal, count) = world(2, _to_one_rank)
    assert before == (
        "sparse diff: module.second is sharded over data-parallel ranks; "
        "call gather_changed() on all of them first"
    )
    assert other == "sparse diff: module.second was gathered to another rank or not at all"
    assert equal and count > 20


def _grid(tp, pp, experts, ep):
    from megatron.core.optimizer.sparse_diff import attach

    with parallel(tp=tp, pp=pp, ep=ep):
        chunk, optimizer = build(experts=experts)
        found = _follow(chunk, optimizer, attach(optimizer), versions=2)
        groups = [d for leaf in optimizer.chained_optimizers for d in [leaf.data_parallel_group.size()]]
        return groups, found


@pytest.mark.parametrize(
    "tp, pp, experts, ep, groups",
    [(2, 1, 0, 1, [2]), (1, 2, 0, 1, [2]), (1, 1, 2, 2, [4, 2]), (1, 1, 1, 1, [4, 4])],
)
def test_tensor_pipeline_and_expert_parallel(world, tp, pp, experts, ep, groups):
    results = world(4, _grid, tp, pp, experts, ep)
    assert [sizes for sizes, _ in results] == [groups] * 4
    if tp == pp == 1:
        assert all(found == results[0][1] for _, found in results)
    assert any(name.startswith("module.expert") and v for name, v in results[0][1][0].items()) == bool(
        experts
    )


def _instances():
    from megatron.core.optimizer.sparse_diff import attach

    with parallel(num_distributed_optimizer_instances=2):
        chunk, optimizer = build(ddp={"num_distributed_optimizer_instances": 2})
        diff = attach(optimizer)
        ranges = {e.name: (e.shard.start, e.shard.end) for e in diff}
        return ranges, _follow(chunk, optimizer, diff, versions=2)


def test_several_optimizer_instances_hold_every_shard_more_than_once(world):
    results = world(4, _instances)
    ranges = [r for r, _ in results]
    assert ranges[0] != ranges[1] and sorted(map(str, ranges[:2])) == sorted(map(str, ranges[2:]))
    assert all(found == results[0][1] for _, found in results) and results[0][1][0]["module.second"]


def _layer_wise():
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.sparse_diff import attach
    from megatron.core.process_groups_config import ProcessGroupCollection

    with parallel():
        chunk, plain = build(distributed=False, experts=1, fp32=False)
        config = plain.chained_optimizers[0].config
        groups = [[], []]
        for param in chunk.parameters():
            if param.requires_grad:
                groups[not getattr(param, "allreduce", True)].append(param)
        inner = torch.optim.AdamW(
            [{"params": g, "is_expert_parallel": e} for e, g in enumerate(groups)], lr=1e-3
        )
        collection = ProcessGroupCollection.use_mpu_process_groups()
        optimizer = LayerWiseDistributedOptimizer([inner], config, collection, model_chunks=[chunk])
        diff = attach(optimizer)
        owned = {e.name for e in diff if e.shard.route == "hooked" and e.shard.numel}
        return owned, _follow(chunk, optimizer, diff, versions=2)


def test_layer_wise_optimizer_each_parameter_whole_on_one_rank(world):
    (owned_0, found_0), (owned_1, found_1) = world(2, _layer_wise)
    assert owned_0 and owned_1 and not owned_0 & owned_1
    assert found_0 == found_1
    for owned in (owned_0, owned_1):
        assert any(found_0[0][name] for name in owned)


class OnMatrices(torch.optim.SGD):
    """Stands in for Muon where its package is not installed: momentum alone, on the same parameters."""

    def __init__(self, params, lr, **_):
        super().__init__(params, lr=lr, momentum=0.9)


class Done:
    def wait(self):
        pass


def _uneven_gather(real):
    """`all_gather` that accepts `async_op` for uneven tensors, as NCCL does."""

    def call(received, sent, group=None, async_op=False):
        real(received, sent, group=group)
        return Done() if async_op else None

    return call


def _muon(layout, overlap):
    """Muon of `get_megatron_optimizer`: matrices whole on one rank; the rest beside them, or, with the
    layout, in a DistributedOptimizer of their own."""
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import emerging_optimizers as emerging
    from megatron.core.optimizer.sparse_diff import attach

    with parallel(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", _uneven_gather(dist.all_gather))
        if not emerging.HAVE_EMERGING_OPTIMIZERS:
            entry = emerging.EmergingOptimizerEntry(
                optimizer_cls=OnMatrices,
                init_state_fn=lambda optimizer, config=None: None,
                config_to_kwargs=lambda config, *_: {"lr": config.lr},
            )
            patch.setitem(emerging._EMERGING_OPTIMIZERS, "muon", entry)
            patch.setattr(optimizers, "HAVE_EMERGING_OPTIMIZERS", True)
        flags = {"overlap_param_gather": overlap}
        config = {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True, **flags}
        ddp = {"overlap_grad_reduce": True, **flags} if overlap else {}
        torch.manual_seed(4)
        chunk, optimizer = build(
            distributed=layout, config=config, ddp=ddp, fp32=False, layer_wise_layout=layout
        )
        diff = attach(optimizer)
        receiver = snapshot(chunk)
        stale, sent = 0, {}
        for version in range(3):
            for seed in range(2):
                step(chunk, optimizer, 10 * version + seed, density=0.03)
            if version == 1:
                diff.invalidate("to send whole tensors")
            if version == 2 and overlap:
                chunk.start_param_sync()  # and is still under way
            diff.gather_changed()
            for name, param in chunk.named_parameters():
                indices, values = diff.changed(param)
                receiver[name].view(-1)[indices] = values
                sent[name] = indices.tolist()
            stale += any(not torch.equal(receiver[n], p.detach()) for n, p in chunk.named_parameters())
            diff.clear(version)
            diff.complete_weights()
            for name, param in chunk.named_parameters():
                assert torch.equal(receiver[name], param.detach()), (name, version)
        here = {e.name: e.shard.numel for e in diff if e.shard.route == "hooked"}
        return {name: n for name, n in here.items() if n}, sent, stale


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", [False, True])
def test_muon_and_what_it_leaves_to_adam(world, layout, overlap):
    (here_0, sent_0, stale_0), (here_1, sent_1, stale_1) = world(2, _muon, layout, overlap)
    assert sent_0 == sent_1 and all(sent_0[n] for n in ("module.first", "module.second", "module.last"))
    matrices = {"module.first", "module.second"}
    assert not (here_0.keys() & here_1.keys() & matrices) and matrices <= here_0.keys() | here_1.keys()
    # a naive reader of this rank's model finds old values while the gather is deferred
    assert bool(stale_0 or stale_1) == overlap


class NaiveHook:
    """Which elements differ before and after each copy on this rank."""

    def __init__(self, model_param, shard_model_weight, shard_main_weight, param_range):
        self.start, self.indices = param_range.start, set()

    def before_copy(self, shard_model_weight):
        self.before = shard_model_weight.clone()

    def after_copy(self, shard_model_weight, shard_main_weight):
        self.indices |= {i + self.start for i in changed_since(self.before, shard_model_weight).tolist()}


def _naive(**options):
    """Names of parameters of which a hook around this rank's copies misses a change of this rank's model."""
    from megatron.core.optimizer import sparse_diff

    instances = options.get("num_distributed_optimizer_instances", 1)
    with parallel(**options):
        previous = sparse_diff.register_manager_factory(NaiveHook)
        try:
            chunk, optimizer = build(fp32=False, ddp={"num_distributed_optimizer_instances": instances})
        finally:
            sparse_diff.register_manager_factory(previous)
        before = snapshot(chunk)
        step(chunk, optimizer, 1)
        missed = set()
        for name, param in chunk.named_parameters():
            known = getattr(getattr(param, "_sparse_manager", None), "indices", set())
            if set(changed_since(before[name], param).tolist()) - known:
                missed.add(name)
        return missed


@pytest.mark.parametrize("ranks, options", [(2, {}), (4, {"num_distributed_optimizer_instances": 2})])
def test_a_naive_hook_misses_what_other_ranks_own(world, ranks, options):
    assert all(world(ranks, _naive, **options))


def _missed_on_one_rank():
    from megatron.core.optimizer.sparse_diff import attach

    with parallel():
        chunk, optimizer = build()
        diff = attach(optimizer, mode="update_and_validate")
        step(chunk, optimizer, 1)
        diff.gather_changed()
        diff.clear(1)
        entry = next(e for e in diff if e.name == "module.second")
        if entry.shard.numel and dist.get_rank() == 1:
            entry.shard.values()[4] += 1
        try:
            diff.gather_changed()
        except RuntimeError as error:
            return str(error), entry.shard.start


def test_a_missed_change_is_an_error_on_all_ranks(world):
    (message, _), (same, start) = world(2, _missed_on_one_rank)
    assert message == same and f"first flat index {start + 4};" in message
    assert message.startswith("sparse diff: module.second: 1 elements changed unseen on rank 1 of its group")


def _overlap():
    from megatron.core.optimizer.sparse_diff import attach

    with parallel():
        torch.manual_seed(3)
        flags = {"overlap_param_gather": True, "overlap_grad_reduce": True}
        chunk, optimizer = build(ddp=flags, config={"overlap_param_gather": True})
        diff = attach(optimizer)
        receiver = snapshot(chunk)
        stale = 0
        for version in range(2):
            step(chunk, optimizer, version, density=0.1)
            diff.gather_changed()
            gathered = {name: diff.changed(param) for name, param in chunk.named_parameters()}
            for name, (indices, values) in gathered.items():
                receiver[name].view(-1)[indices] = values
            stale += sum(not torch.equal(receiver[n], p.detach()) for n, p in chunk.named_parameters())
            diff.clear(version)
            diff.complete_weights()
            assert all(torch.equal(receiver[n], p.detach()) for n, p in chunk.named_parameters())
        return stale


def test_values_come_from_their_owner_while_the_parameter_gather_is_deferred(world):
    assert all(world(2, _overlap))  # each rank held stale elements when it received


def _without(attached):
    from megatron.core.optimizer.sparse_diff import attach

    with parallel():
        torch.manual_seed(7)
        chunk, optimizer = build(experts=1)
        diff = attach(optimizer) if attached else None
        for seed in range(4):
            step(chunk, optimizer, seed)
            if attached and seed != 2:
                diff.gather_changed()
                diff.clear(seed)
        return {name: value.float().numpy().tobytes() for name, value in snapshot(chunk).items()}


def test_training_is_bit_for_bit_the_same(world):
    assert world(2, _without, False) == world(2, _without, True)


def _traffic(heavy_rank):
    """Bytes that collectives carry, by recording them; changes on one rank only, or on both."""
    from megatron.core.optimizer.sparse_diff import gather as module
    from megatron.core.optimizer.sparse_diff.shards import HookedShard

    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.zeros(n, dtype=torch.bfloat16) for n in (4001, 997, 12007)]
    shards = []
    for tensor in tensors:
        edges = [0, tensor.numel() // 3, tensor.numel()] if size == 2 else None
        shard = HookedShard(tensor, edges[rank], edges[rank + 1])
        if heavy_rank in (None, rank):
            source = torch.zeros(shard.numel)
            source[::50] = rank + 1.0
            shard.copy_captured(shard.values(), source, False)
        shards.append(shard)
    calls = []
    real = {name: getattr(dist, name) for name in ("all_gather_into_tensor", "broadcast")}

    def record(name):
        def call(out, *args, **kwargs):
            calls.append((name, out.nbytes))
            return real[name](out, *args, **kwargs)

        return call

    for name in real:
        setattr(dist, name, record(name))
    try:
        changes, _ = module.gather(["a", "b", "c"], tensors, shards, dist.group.WORLD)
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    return [c.indices.tolist() for c in changes], [c.values.tolist() for c in changes], calls


@pytest.mark.parametrize("heavy_rank", [None, 0, 1])
def test_traffic_follows_the_changes(world, heavy_rank):
    (indices, values, calls), other = world(2, _traffic, heavy_rank)
    assert (indices, values) == other[:2]
    changed = sum(len(i) for i in indices)
    assert changed > 80 and {v for per in values for v in per} == (
        {1, 2} if heavy_rank is None else {heavy_rank + 1}
    )
    sizes, *rest = calls
    assert sizes == ("all_gather_into_tensor", 2 * 3 * 4 * 8)  # ranks, tensors, four int64
    assert (
        sum(n for _, n in rest) <= 2 * 6 * changed
    )  # int32 index and bf16 value, at most doubled by padding


def _overlap_whole(dst):
    from megatron.core.optimizer.sparse_diff import attach

    with parallel():
        torch.manual_seed(3)
        flags = {"overlap_param_gather": True, "overlap_grad_reduce": True}
        chunk, optimizer = build(ddp=flags, config={"overlap_param_gather": True})
        diff = attach(optimizer, unhooked="dense")
        step(chunk, optimizer, 1, density=0.1)
        if dist.get_rank() == 0:
            diff.invalidate("on one rank only")
        diff.gather_changed(dst=dst)
        if dst not in (None, dist.get_rank()):
            return None
        dense = {name: diff.is_dense(param) for name, param in chunk.named_parameters()}
        received = {name: diff.changed(param).values.clone() for name, param in chunk.named_parameters()}
        routes = {entry.name: entry.shard.route for entry in diff}
        for name, param in chunk.named_parameters():
            if dense[name]:
                expected = getattr(param, "main_param", None)  # fp32 shard of this rank, if any
                entry = next(e for e in diff if e.name == name)
                if expected is not None:
                    mine = received[name][entry.shard.start : entry.shard.end]
                    assert torch.equal(mine, expected.to(param.dtype)), name
        return dense, routes["module.scale"], {n: v.float().sum().item() for n, v in received.items()}


@pytest.mark.parametrize("dst", [None, 1])
def test_whole_tensors_are_complete_while_the_parameter_gather_is_deferred(world, dst):
    results = [r for r in world(2, _overlap_whole, dst) if r is not None]
    for dense, route, _ in results:
        assert dense["module.scale"] and route == "dense" and not dense["module.fixed"]
        assert any(dense[name] for name in ("module.first", "module.second"))
    assert len(results) == 1 or results[0] == results[1]


def _past_two_to_the_31():
    """Indices of a tensor of 2^31 + 96 elements that occupies two bytes: its strides are zero."""
    from megatron.core.optimizer.sparse_diff.bitmask import Bitmask
    from megatron.core.optimizer.sparse_diff.gather import gather
    from megatron.core.optimizer.sparse_diff.shards import HookedShard

    numel, rank = 2**31 + 96, dist.get_rank()
    tensor = torch.full((1,), 3.0, dtype=torch.bfloat16).expand(numel)
    edges = [2**31 - 64, 2**31 + 32, numel]
    shard = HookedShard(tensor, edges[rank], edges[rank + 1])
    changed = torch.zeros(shard.numel, dtype=torch.bool)
    changed[[0, 33, shard.numel - 1]] = True
    [shard.bits] = Bitmask.zeros([shard.numel], "cpu")
    shard.bits._mark(0, changed)
    [changes], _ = gather(["long"], [tensor], [shard], dist.group.WORLD)
    return changes.indices.tolist(), changes.values.tolist()


def test_indices_past_two_to_the_31(world):
    places = [2**31 - 64, 2**31 - 31, 2**31 + 31, 2**31 + 32, 2**31 + 65, 2**31 + 95]
    assert world(2, _past_two_to_the_31) == [(places, [3.0] * 6)] * 2


def _real_model(tied, overlap, **options):
    """A bf16 MoE GPT through forward and backward, with expert bias updated by finalize_model_grads."""
    from megatron.core.optimizer.sparse_diff import attach
    from tests.dist import small_gpt

    dtype = torch.bfloat16
    with parallel(**options):
        cfg = small_gpt.config(
            moe=True, params_dtype=dtype, num_layers=2, moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.01, moe_router_dtype="fp32",
        )  # fmt: skip
        trainer = small_gpt.Trainer(cfg, small_gpt.build(cfg, tied=tied), overlap=overlap)
        diff = attach(trainer.optimizer)
        tensors = {entry.name: entry.tensor for entry in diff}
        receiver = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        counts = {}
        for version in range(2):
            trainer.train(steps=1)
            if overlap:  # the receiver must be right although this rank's own copy is not complete
                for chunk in trainer.ddp:
                    chunk.start_param_sync(force_sync=True)
            diff.gather_changed()
            for name, tensor in tensors.items():
                indices, values = diff.changed(tensor)
                if diff.is_dense(tensor):
                    receiver[name] = values.view(tensor.shape).clone()
                receiver[name].view(-1)[indices] = values
                assert torch.equal(receiver[name], tensor.detach()), name
                counts[name] = indices.numel()
                # the router turns its bias to fp32 in the first forward
                assert diff.is_dense(tensor) == (name.endswith("expert_bias") and version == 0), name
            diff.clear(version)
        return counts, {entry.name: entry.shard.route for entry in diff}


@pytest.mark.parametrize(
    "options", [{"tp": 2, "tied": True, "overlap": False}, {"pp": 2, "ep": 2, "tied": False, "overlap": True}]
)
def test_a_mixture_of_experts_through_forward_and_backward(world, options):
    results = world(4, _real_model, **options)
    counts = {name: n for per_rank, _ in results for name, n in per_rank.items()}
    routes = {name: r for _, per_rank in results for name, r in per_rank.items()}
    biases = [name for name in routes if name.endswith("expert_bias")]
    assert biases and all(routes[name] == "shadow" and counts[name] for name in biases)
    hooked = [name for name, route in routes.items() if route == "hooked"]
    assert len(hooked) > 10 and sum(counts[name] for name in hooked) > 1000


def _observed(folder):
    from megatron.core.optimizer.sparse_diff import attach
    from tests.dist import small_gpt

    with parallel(pp=2):
        cfg = small_gpt.config(params_dtype=torch.bfloat16, num_layers=4, mtp_num_layers=1)
        trainer = small_gpt.Trainer(cfg, small_gpt.build(cfg))
        diff = attach(trainer.optimizer, mode="observe", observe_dir=folder)
        before = {entry.name: entry.tensor.detach().clone() for entry in diff}
        trainer.train(steps=1)
        diff.observe()
        [model] = trainer.ddp
        first = model.module.module.decoder.layers[0]
        inside = {id(p) for p in first.parameters()}
        counts = [
            (changed_since(before[e.name], e.tensor).numel(), e.tensor.numel())
            for e in diff
            if id(e.tensor) in inside
        ]
        return first.layer_number - 1, sum(c for c, _ in counts) / sum(n for _, n in counts)


def test_densities_by_layer_over_pipeline_stages(world, tmp_path):
    """Each stage counts its layers from 0; the record counts them all, and multi-token prediction apart."""
    from megatron.core.optimizer.sparse_diff.observe import densities

    expected = dict(world(2, _observed, str(tmp_path)))
    [found] = densities(tmp_path).values()
    assert sorted(expected) == [0, 2] and set(found) == {0, 1, 2, 3, None}
    assert {layer: found[layer] for layer in expected} == expected and all(expected.values())
    [by_name] = densities(tmp_path, by="name").values()
    assert sum("decoder.layers.3." in name for name in by_name) > 4
    assert sum("mtp.layers.0." in name for name in by_name) > 4
