import pytest
import torch
from torch import nn

from megatron import weight_sync as ws
from tests.cpu.weight_sync.trainer import Trainer

torch.set_num_threads(1)


class Tiny(nn.Module):
    """Odd sizes, tied weights, a persistent buffer in fp32, an empty and a one-element tensor."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.embed = nn.Embedding(11, 6, dtype=dtype)
        self.proj = nn.Linear(6, 9, dtype=dtype)
        self.head = nn.Linear(6, 11, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.empty = nn.Parameter(torch.empty(0, 4, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(5, dtype=dtype), requires_grad=False)
        self.register_buffer("bias_correction", torch.zeros(7))


@pytest.fixture
def tiny():
    def make(seed, dtype=torch.bfloat16):
        torch.manual_seed(seed)
        return Tiny(dtype)

    return make


@pytest.fixture
def tensors_of():
    """Name → tensor of a module as a trainer exports it: tied weights once."""

    def get(module):
        seen, out = set(), {}
        for name, tensor in module.state_dict().items():
            if not tensor.numel() or tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                out[name] = tensor
        return out

    return get


@pytest.fixture
def bits():
    """Every stored bit of a module, to compare before and after."""

    def get(module):
        return {k: v.detach().reshape(-1).view(torch.uint8).clone() for k, v in module.state_dict().items()}

    return get


@pytest.fixture
def pair(tiny, tensors_of):
    """(trainer, receiver module, receiver), after one dense sync."""

    def make(dtype=torch.bfloat16, **kwargs):
        trainer = Trainer(tensors_of(tiny(1, dtype)), **kwargs)
        module = tiny(2, dtype)
        receiver = ws.ModuleReceiver(module)
        trainer.sender.register("r")
        assert trainer.acknowledge("r", receiver.apply(trainer.publish()))
        return trainer, module, receiver

    return make


@pytest.fixture
def refused(bits):
    def check(receiver, module, payload, error, match):
        before, status = bits(module), receiver.status()
        with pytest.raises(error, match=match) as caught:
            receiver.apply(payload)
        assert type(caught.value) is error
        after = bits(module)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert receiver.status() == status and not receiver.poisoned

    return check
