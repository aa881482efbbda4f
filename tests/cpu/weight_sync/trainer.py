"""A sender whose changes are known exactly, and whether a receiver holds what it has."""

import torch

from megatron import weight_sync as ws

SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40]


class Trainer:
    """A model whose changes are known exactly, as change bits would know them."""

    def __init__(self, tensors, **kwargs):
        self.tensors = tensors
        self.sender = ws.Sender("tiny/1", lineage=kwargs.pop("lineage", 7), **kwargs)
        self.bits = {name: torch.zeros(t.numel(), dtype=torch.bool) for name, t in tensors.items()}

    def step(self, density, gen):
        for name, tensor in self.tensors.items():
            flat, old = tensor.view(-1), tensor.clone().view(-1)
            hit = (torch.rand(tensor.numel(), generator=gen) < density).nonzero().view(-1)
            new = torch.randn(len(hit), generator=gen)
            for k in range(0, len(hit), 5):
                new[k] = SPECIAL[(k + len(hit)) % len(SPECIAL)]
            flat[hit] = new.to(tensor.dtype)
            self.bits[name] |= ws.fingerprints.bits_of(flat) != ws.fingerprints.bits_of(old)

    def publish(self, dense=None, again=False):
        update = self.sender.begin(dense, again=again)
        for name, tensor in self.tensors.items():
            if update.dense:
                update.add_dense(name, tensor)
            else:
                index = self.bits[name].nonzero().view(-1)
                update.add_delta(name, index, tensor.view(-1)[index], tuple(tensor.shape), full=tensor)
        return update.finish(ws.fingerprint(self.tensors))

    def acknowledge(self, name, ack):
        if self.sender.acknowledge(name, ack):
            for bits in self.bits.values():
                bits.zero_()
            return True
        return False


def same(trainer, module):
    state = module.state_dict()
    return all(
        torch.equal(ws.fingerprints.bits_of(t), ws.fingerprints.bits_of(state[n]))
        for n, t in trainer.tensors.items()
    )
