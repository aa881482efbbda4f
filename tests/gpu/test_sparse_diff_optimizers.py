"""Real optimizers on a GPU, their streams and fused kernels: the diff against copies of the whole model."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available() or "megatron.cpu_runtime" in sys.modules:
    pytest.skip("needs CUDA, in a process without the cpu runtime", allow_module_level=True)

import torch.distributed as dist

import megatron.core.optimizer as optimizers
from megatron.core.optimizer.sparse_diff import attach
from tests.dist.small_optimizer import bits, build, changed_since, snapshot, step
from tests.dist.world import parallel

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def single():
    torch.cuda.set_device(0)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    with parallel():
        yield


def tensors_of(chunk):
    tensors = dict([*chunk.named_parameters(), *chunk.named_buffers()])
    return {name: tensor for name, tensor in tensors.items() if "scratch" not in name}


def follow(chunk, optimizer, overflow=False):
    """Routes by name. Steps, with a sync in flight over one of them; a receiver follows exactly."""
    diff = attach(optimizer, model_chunks=[chunk])
    receiver = snapshot(chunk)
    union = {name: set() for name in receiver}
    hooked = {entry.tensor for entry in diff if entry.shard.route == "hooked"}

    def train(seed, scale=1.0):
        before = snapshot(chunk)
        done, *_ = step(chunk, optimizer, seed, density=0.05, scale=scale)
        for name, tensor in tensors_of(chunk).items():
            union[name] |= set(changed_since(before[name], tensor).tolist())
        return done

    for version in range(1, 4):
        assert train(10 * version)
        assert not overflow or not train(10 * version + 1, float("inf"))
        diff.gather_changed()
        for name, tensor in tensors_of(chunk).items():
            indices, values = diff.changed(tensor)
            receiver[name].view(-1)[indices] = values
            assert torch.equal(bits(receiver[name]), bits(tensor)), name
            if tensor in hooked:
                assert indices.tolist() == sorted(union[name]), name
            union[name].clear()
        assert train(10 * version + 2)  # before the acknowledgement: it belongs to the next sync
        diff.clear(version)
    return {entry.name.removeprefix("module."): entry.shard.route for entry in diff}


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_main_weights_are_followed(distributed, dtype):
    half = dtype == torch.float16
    config = {"initial_loss_scale": 2.0**8} if half else {}
    chunk, optimizer = build(dtype, distributed=distributed, fp32=not half, config=config)
    routes = follow(chunk, optimizer, overflow=half)
    assert routes["second"] == ("shadow" if dtype == torch.float32 else "hooked")


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_hybrid_device_optimizer_on_its_streams(monkeypatch, aware, overlap, fraction):
    monkeypatch.setattr(optimizers, "USING_PYTORCH_OPTIMIZER", False)
    config = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": fraction,
        "overlap_cpu_optimizer_d2h_h2d": overlap,
        "use_precision_aware_optimizer": aware,
    }
    chunk, optimizer = build(fp32=False, lr=1e-2, config=config)
    hybrid = optimizer.chained_optimizers[0].optimizer
    assert all(param.device.type == "cpu" for param in hybrid.cpu_copys_map_gpu_param)
    assert hybrid.cpu_copys_map_gpu_param and (hybrid.gpu_optimizer is None) == (fraction == 1.0)
    assert follow(chunk, optimizer)["second"] == "hooked"


@pytest.mark.skipif(optimizers.USING_PYTORCH_OPTIMIZER, reason="needs Transformer Engine's FusedAdam")
@pytest.mark.parametrize("remainders", [True, False])
def test_precision_aware_fused_adam_writes_parameters_itself(remainders):
    config = {"use_precision_aware_optimizer": True, "store_param_remainders": remainders}
    chunk, optimizer = build(fp32=False, config=config)
    assert follow(chunk, optimizer)["second"] == "shadow"


@pytest.mark.parametrize("distributed", [True, False])
def test_training_is_bit_for_bit_the_same_with_and_without(distributed):
    found = []
    for attached in (False, True):
        torch.manual_seed(5)
        chunk, optimizer = build(distributed=distributed)
        if attached:
            follow(chunk, optimizer)
        else:
            for version in range(1, 4):
                for seed in (10 * version, 10 * version + 2):
                    step(chunk, optimizer, seed, density=0.05)
        found.append(snapshot(chunk))
    for name, value in found[0].items():
        assert torch.equal(bits(value), bits(found[1][name])), name
