"""One process, no GPU: Megatron-Core on CPU with a gloo world of this process alone."""

import pytest
import torch

import megatron.cpu_runtime

megatron.cpu_runtime.install()  # at collection: test files import megatron.core at their top
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def single_process_group():
    """torch.distributed with a world of one, without a port."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture
def single(single_process_group):
    """Megatron's parallel state for one process, seeded; torn down after the test."""
    from tests.dist.world import parallel

    with parallel():
        yield
