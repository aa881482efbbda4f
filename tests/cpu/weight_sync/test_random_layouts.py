"""Layouts drawn at random: the boxes found put every element where the engine's own loader puts it."""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch

from megatron.weight_sync.engines import probe

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@dataclass
class Copy:
    """A loader's assignment: ``live`` takes some elements of the full tensor, in some order of its axes."""

    name: str
    live: torch.Tensor
    shape: list[int]
    slices: list[slice]
    axes: list[int]

    def do(self, full):
        self.live.copy_(full.reshape(self.shape)[tuple(self.slices)].permute(self.axes))


def scattered(rng, shape, dtype):
    """A live tensor with its axes in any order in memory, and gaps."""
    strides, step = [0] * len(shape), rng.choice([1, 1, 1, 2])
    for axis in rng.sample(range(len(shape)), len(shape)):
        strides[axis] = step
        step = step * shape[axis] + rng.choice([0, 0, 0, 1, 3])
    offset = rng.choice([0, 5])
    return torch.zeros(offset + step + 1, dtype=dtype).as_strided(shape, strides, offset)


def drawn_copy(rng, live, name):
    """Along each axis ``live`` takes all of the full tensor, a range, or every second element."""
    axes = rng.sample(range(live.dim()), live.dim())
    shape, slices = [], []
    for size in (live.shape[axis] for axis in axes):
        times, step = rng.choice([(1, 1), (1, 1), (2, 1), (3, 1), (2, 2)])
        begin = rng.randrange(times) * (size if step == 1 else 1)
        shape.append(times * size)
        slices.append(slice(begin, begin + step * size if step == 1 else None, step))
    return Copy(name, live, shape, slices, [axes.index(axis) for axis in range(live.dim())])


def draw(rng):
    """(table, live tensors, copies) of an engine that fuses full tensors along an axis, or stacks them."""
    table, live, copies = {}, {"table": torch.arange(5)}, []
    for layer in range(rng.randint(1, 4)):
        dtype, size = rng.choice(DTYPES), [rng.choice([1, 2, 3, 5, 8, 12]) for _ in range(rng.randint(1, 4))]
        axis, count = rng.randrange(len(size)), rng.randint(1, 4)
        whole = scattered(rng, [n * count if k == axis else n for k, n in enumerate(size)], dtype)
        live[f"layers.{layer}"] = whole
        if rng.random() < 0.3:
            live[f"layers.{layer}.half"] = whole[: (whole.shape[0] + 1) // 2]
        for k, part in enumerate(whole.split(size[axis], axis)):
            name = f"layers.{layer}.{k}"
            copies.append(drawn_copy(rng, part, name))
            flat = [math.prod(copies[-1].shape)]
            table[name] = tuple(rng.choice([copies[-1].shape, copies[-1].shape, flat])), dtype
            if rng.random() < 0.1:
                live[f"{name}.again"] = scattered(rng, part.shape, dtype)
                copies.append(replace(copies[-1], live=live[f"{name}.again"]))
    return table, live, copies


def memory(tensor):
    """All of the memory that a tensor is a view of."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


@pytest.mark.parametrize("bits", [5, 14])  # of a digit: several digits for an index, and several batches
@pytest.mark.parametrize("seed", range(100))
def test_the_boxes_found_are_what_the_loader_does(seed, bits, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(probe, "_BITS", bits)
    monkeypatch.setattr(probe, "_BASE", 1 << bits)
    monkeypatch.setattr(probe, "_THEN_SEEN", (1 << bits) - 2)
    monkeypatch.setattr(probe, "_CHUNK", rng.choice([20, 64, 1000, 1 << 24]))
    table, live, copies = draw(rng)

    def load(pairs):
        for name, full in pairs:
            for copy in copies:
                if copy.name == name:
                    copy.do(full)

    targets = probe.discover(table, live, load, rng.choice([50, 300, 1 << 27]))
    assert torch.equal(live.pop("table"), torch.arange(5))
    tensors = {name: 1 + torch.rand(shape).to(dtype) for name, (shape, dtype) in table.items()}
    results = []
    for write in (
        lambda: load(tensors.items()),
        lambda: [
            box.copy_to_local(tensors[name], flat) for name in table for flat, box in targets[name].pieces
        ],
    ):
        for tensor in live.values():
            memory(tensor).zero_()
        write()
        results.append([memory(tensor).clone() for tensor in live.values()])
    loaded, boxed = results
    assert any(tensor.any() for tensor in loaded)
    assert all(torch.equal(a, b) for a, b in zip(loaded, boxed, strict=True))
