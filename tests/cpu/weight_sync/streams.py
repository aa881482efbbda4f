"""What a sender publishes of named tensors: whole, as changes, or either as an update asks."""

import torch

from megatron import weight_sync as ws
from megatron.weight_sync.fingerprints import bits_of


def dense(sender, tensors, again=False):
    update = sender.begin(dense=True, again=again)
    for name, tensor in tensors.items():
        update.add_dense(name, tensor)
    return update.finish(ws.fingerprint(tensors))


def step(tensors, gen):
    old = {n: t.clone() for n, t in tensors.items()}
    for tensor in tensors.values():
        flat = tensor.view(-1)
        hit = torch.rand(len(flat), generator=gen) < 0.1
        flat[hit] = torch.randn(int(hit.sum()), generator=gen).to(flat.dtype)
    return old


def delta(sender, tensors, old):
    update = sender.begin(dense=False)
    for name, tensor in tensors.items():
        index = (bits_of(tensor) != bits_of(old[name])).view(-1).nonzero().view(-1)
        update.add_delta(name, index, tensor.view(-1)[index], tensor.shape, old=old[name].view(-1)[index])
    return update.finish(ws.fingerprint(tensors))


def fill(tensors, old):
    """For ``synchronise``: the tensors into an update, changes counted from ``old``."""

    def into(update):
        for name, tensor in tensors.items():
            if update.dense:
                update.add_dense(name, tensor)
            else:
                index = (bits_of(tensor) != bits_of(old[name])).view(-1).nonzero().view(-1)
                update.add_delta(name, index, tensor.view(-1)[index], tensor.shape)
        return ws.fingerprint(tensors)

    return into
