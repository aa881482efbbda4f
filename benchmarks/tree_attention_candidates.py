"""Ways to run tree attention on flash-attn-4, timed against each other by `bench_tree_attention.py --tune`.

A candidate is a mask, the block lists of one direction, and whether the query heads of a key head share a
tile. What the product uses is the first of each direction. Head size 128.
"""

import dataclasses
import functools
import math

import torch

from benchmarks import recording
from megatron.core.transformer.tree_attention import flash


@dataclasses.dataclass(frozen=True)
class Candidate:
    name: str
    blocks: tuple[int, int]
    mask: str = "shipped"
    pack_gqa: bool | None = None


FORWARD = [
    Candidate("shipped: one comparison, PTX loads, 128 x 128", (128, 128)),
    Candidate("two comparisons, plain loads", (128, 128), "two"),
    Candidate("one comparison, plain loads", (128, 128), "one"),
    Candidate("query heads apart", (128, 128), pack_gqa=False),
    Candidate("128 x 64", (128, 64)),
]
BACKWARD = [
    Candidate("shipped: one comparison, PTX loads, 64 x 128", (64, 128)),
    Candidate("two comparisons, plain loads", (64, 128), "two"),
    Candidate("one comparison, plain loads", (64, 128), "one"),
    Candidate("128 x 128", (128, 128)),
    Candidate("80 x 128", (80, 128)),
]


def _plain_masks():
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def two(batch, head, query, key, seqlen_info, aux_tensors):
        end = scalar_to_ssa(aux_tensors[0][key[0]], cutlass.Int32)
        return (key <= query) & (query < end)

    @cute.jit
    def one(batch, head, query, key, seqlen_info, aux_tensors):
        reach = scalar_to_ssa(aux_tensors[0][key[0]], cutlass.Int32)
        return (query - key).to(cutlass.Uint32) < reach.to(cutlass.Uint32)

    return {"two": two, "one": one}


class Case:
    """One tree's tensors; every call computes one direction of one candidate."""

    def __init__(self, metadata, tensors, upstream):
        self.metadata = metadata
        self.q, self.k, self.v = (t.detach()[None] for t in tensors)
        self.upstream = upstream[None]
        self.scale = 1 / math.sqrt(self.q.shape[-1])
        self.masks = _plain_masks()
        self.out, self.lse = self.forward(FORWARD[0])

    def _options(self, candidate, transposed):
        plain = self.masks.get(candidate.mask)
        aux = (
            [self.metadata.subtree_end]
            if candidate.mask == "two"
            else flash.mask_tensors(self.metadata, None)
        )
        return dict(
            softmax_scale=self.scale,
            mask_mod=plain or flash._mask(None),
            aux_tensors=aux,
            block_sparse_tensors=flash.sparse_tensors(
                self.metadata, candidate.blocks, transposed=transposed, window=None
            ),
        )

    def forward(self, candidate):
        from flash_attn.cute.interface import _flash_attn_fwd

        return _flash_attn_fwd(
            self.q,
            self.k,
            self.v,
            return_lse=True,
            pack_gqa=candidate.pack_gqa,
            **self._options(candidate, False),
        )[:2]

    def backward(self, candidate):
        from flash_attn.cute.interface import _flash_attn_bwd

        return _flash_attn_bwd(
            self.q, self.k, self.v, self.out, self.upstream, self.lse, **self._options(candidate, True)
        )


def _distance(got, want):
    return max(
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, want, strict=True)
    )


@torch.no_grad()
def compare(rows, name, metadata, tensors, upstream, tflops):
    """Adds a row for every candidate; {(direction, candidate): TF/s on exact pairs}, best of two rounds."""
    case, found = Case(metadata, tensors, upstream), {}
    for direction, candidates, run in (
        ("forward", FORWARD, case.forward),
        ("backward", BACKWARD, case.backward),
    ):
        # Backward adds in any order: what it differs by from itself is allowed.
        want, working = run(candidates[0]), []
        for candidate in candidates:
            try:
                apart = _distance(run(candidate), want)
            except Exception as error:  # a candidate that this version of the package refuses
                print(
                    f"{name}: {direction}, {candidate.name} cannot: {str(error).splitlines()[:1]}", flush=True
                )
                continue
            if not apart < 5e-3:
                print(f"{name}: {direction}, {candidate.name} is wrong by {apart:.1e}", flush=True)
                continue
            working.append(candidate)
        times = {}
        for _ in range(2):  # in turns, so that a clock that drifts is no one's advantage
            for candidate in working:
                ms = recording.milliseconds(functools.partial(run, candidate), 10, warmup=2)
                times[candidate] = min(ms, times.get(candidate, ms))
        for candidate, ms in times.items():
            found[direction, candidate.name] = tflops(ms, direction == "backward")
            rows.add(
                name,
                f"{direction}: {candidate.name}",
                found[direction, candidate.name],
                "TF/s",
                found[direction, working[0].name],
            )
    return found


def table(found_by_case):
    """Markdown: candidates down, trees across, TF/s on exact pairs."""
    lines = ["| candidate | " + " | ".join(found_by_case) + " |", "|---" * (len(found_by_case) + 1) + "|"]
    for key in [(d, c.name) for d, cs in (("forward", FORWARD), ("backward", BACKWARD)) for c in cs]:
        cells = [f"{found[key]:.0f}" if key in found else "-" for found in found_by_case.values()]
        lines.append(f"| {key[0]}: {key[1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
