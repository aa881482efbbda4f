"""The trie behind one packed (THD) sequence: which token belongs to which node, and where on its path.

A pack holds one or more tries in depth-first order: a node's tokens are contiguous, and a node is followed
by its whole subtree before its next sibling starts. Shapes: T packed tokens, N real nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

    from megatron.core.packed_seq_params import PackedSeqParams

_Cached = TypeVar("_Cached")


class RouterStatistics(NamedTuple):
    """What a micro-batch tells the routers of MoE layers, see ``transformer.moe.tree_router``."""

    weights_T: torch.Tensor
    """float32 [T]: tokens of the linear layout that each packed token stands for, 0 for padding."""

    averaged_scale: float | torch.Tensor
    """Of auxiliary losses, where upstream averages over micro-batches and ranks."""

    per_token_scale: float | torch.Tensor
    """Of auxiliary losses, where upstream divides by the loss function's token count: the micro-batch's
    tokens in the linear layout."""


@dataclass(eq=False)
class TreeMetadata:
    """Tree structure of one THD pack, carried by ``PackedSeqParams.tree_metadata``.

    Make one with ``from_nodes``, which checks it, or from tensors of your own, and then call ``validate``: on
    a GPU, what does not hold together would be computed all the same. Tensors lie on any one device, usually
    that of the tokens. Treat an instance as immutable: what is derived from it is kept in a private cache,
    which ``copy``, ``deepcopy``, ``pickle`` and ``to`` do not carry over. Two instances are equal only if
    they are the same object.
    """

    cu_node_lens: torch.Tensor
    """int32 [N + 1], or [N + 2] when the last node is padding: cumulative token counts, from 0 to T."""

    node_parent: torch.Tensor
    """int32 [N]: index of the parent node, -1 for a root. Depth-first preorder: parents come first."""

    tree_position_ids: torch.Tensor
    """int64 [T]: position of each token on its own path from the root. 0 for padding."""

    padded_size: int
    """T: packed length including padding."""

    num_nodes: int
    """N: real nodes. Padding is one more root after them."""

    precomputed: dict | None = None
    """Buffers that a tree-capable Transformer Engine prepared. Passed on untouched, never written here."""

    max_position: int | None = None
    """Largest position id, known on the host so that nobody has to read it back from a device."""

    router_statistics: RouterStatistics | None = field(default=None, kw_only=True, repr=False)
    """For MoE routers, goes wherever the tree goes. None counts every real token once."""

    roots_only: bool = field(default=False, kw_only=True, repr=False)
    """Known on the host: every node is a root, the pack is ordinary sequences, end to end. False where
    nodes have children, and where nobody knows."""

    _cache: dict = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def from_nodes(
        cls,
        parents: Sequence[int],
        lengths: Sequence[int],
        *,
        padded_to: int = 1,
        padded_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> TreeMetadata:
        """Describe nodes given in depth-first preorder.

        Args:
            parents: N parent indices, -1 for a root; a list, an array or a tensor, as are lengths.
            lengths: N token counts, each at least 1.
            padded_to: pad the pack with one trailing root so that T is a multiple of this.
            padded_size: pad to exactly this T instead (also the way to make an all-padding pack: no nodes).
            device: where the tensors go. Everything is computed on the host first.

        Raises:
            ValueError: for anything that ``validate`` refuses, and for a padded size that is too small.
        """
        import torch

        # NumPy's and torch's integers become Python's: sizes and positions must be known on the host.
        parents, lengths = _integers(parents, "parents"), _integers(lengths, "lengths")
        if len(parents) != len(lengths):
            raise ValueError(f"lengths: expected one per parent, {len(parents)}, got {len(lengths)}")
        [padded_to] = _integers([padded_to], "padded_to")
        if padded_size is not None:
            [padded_size] = _integers([padded_size], "padded_size")
        if padded_to < 1:
            raise ValueError(f"padded_to: expected at least 1, got {padded_to}")
        starts, bounds = [], [0]
        for node, (parent, length) in enumerate(zip(parents, lengths, strict=True)):
            if length < 1:
                raise ValueError(f"lengths: expected at least 1 token per node, got {length} for node {node}")
            if not -1 <= parent < node:
                raise ValueError(f"node_parent: expected -1 or an earlier node for node {node}, got {parent}")
            starts.append(0 if parent < 0 else starts[parent] + lengths[parent])
            bounds.append(bounds[-1] + length)
        real = bounds[-1]
        if padded_size is None:
            padded_size = -(-real // padded_to) * padded_to
        elif padded_size < real or padded_size % padded_to:
            raise ValueError(
                f"padded_size: expected a multiple of {padded_to} that holds {real} tokens, got {padded_size}"
            )
        if padded_size == 0:
            raise ValueError("padded_size: expected at least one token, got an empty pack")
        if padded_size > real:
            bounds.append(padded_size)
        counts = torch.tensor(lengths, dtype=torch.int64)
        offset = torch.tensor(starts, dtype=torch.int64) - torch.tensor(bounds[: len(lengths)])
        position_ids = torch.zeros(padded_size, dtype=torch.int64)
        position_ids[:real] = torch.arange(real) + offset.repeat_interleave(counts)
        made = cls(
            cu_node_lens=torch.tensor(bounds, dtype=torch.int32),
            node_parent=torch.tensor(parents, dtype=torch.int32),
            tree_position_ids=position_ids,
            padded_size=padded_size,
            num_nodes=len(lengths),
            max_position=max((s + n - 1 for s, n in zip(starts, lengths, strict=True)), default=0),
            roots_only=all(parent < 0 for parent in parents),
        )
        made.validate_once()
        return made if device is None else made.to(device)

    @property
    def total_tokens(self) -> int:
        """T, padding included."""
        return self.padded_size

    @property
    def has_padding(self) -> bool:
        """Whether the last entry of ``cu_node_lens`` closes a padding node."""
        return self.cu_node_lens.numel() == self.num_nodes + 2

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.cu_node_lens.device

    @property
    def subtree_end(self) -> torch.Tensor:
        """int32 [T]: packed index just past the last token of the subtree of the token's node.

        Query q may attend to key k if and only if ``k <= q < subtree_end[k]``. Derived on the tensors' device
        without reading anything back, once per instance.
        """
        return self.cached("subtree_end", _subtree_end)

    def cached(self, key: Any, build: Callable[[TreeMetadata], _Cached]) -> _Cached:
        """What ``build(self)`` returned the first time it was asked for under ``key`` on this instance."""
        if key not in self._cache:
            import torch

            # Scored under inference_mode first, a micro-batch is trained on with the same cache afterwards.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
                self._cache[key] = build(self)
        return self._cache[key]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TreeMetadata:
        """Copy with the tensors on ``device``, or self if they lie there; ``precomputed`` is not moved.

        Raises:
            TypeError: ``device`` is none, for instance a dtype.
        """
        import torch

        if not isinstance(device, (torch.device, str, int)):
            raise TypeError(f"device: expected a torch.device or its name, got {device!r}")
        statistics = self.router_statistics or ()
        here = self.cu_node_lens, self.node_parent, self.tree_position_ids, *statistics
        there = [
            t.to(device, non_blocking=non_blocking) if isinstance(t, torch.Tensor) else t for t in here
        ]
        if all(moved is t for moved, t in zip(there, here, strict=True)):
            return self
        return TreeMetadata(
            *there[:3],
            self.padded_size,
            self.num_nodes,
            self.precomputed,
            self.max_position,
            router_statistics=RouterStatistics(*there[3:]) if statistics else None,
            roots_only=self.roots_only,
        )

    def packed_seq_params(self) -> PackedSeqParams:
        """The pack as one THD sequence whose rope tables are as long as the tree is deep."""
        import torch

        from megatron.core.packed_seq_params import PackedSeqParams

        if self.max_position is None:
            raise ValueError("max_position: expected the largest position id as an int, got None")
        # zeros and a fill, not a list: no copy from pageable host memory, so no synchronisation.
        cu_seqlens = torch.zeros(2, dtype=torch.int32, device=self.device)
        cu_seqlens[1:].fill_(self.padded_size)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=self.max_position + 1,
            max_seqlen_kv=self.max_position + 1,
            tree_metadata=self,
        )

    def validate(self) -> TreeMetadata:
        """Check every field against every other; reads device tensors back. Returns self.

        Raises:
            ValueError: naming the field, what was expected and what was got.
        """
        _check_tensor(self.cu_node_lens, "cu_node_lens", "int32")
        _check_tensor(self.node_parent, "node_parent", "int32")
        _check_tensor(self.tree_position_ids, "tree_position_ids", "int64")
        if not self.cu_node_lens.device == self.node_parent.device == self.tree_position_ids.device:
            raise ValueError(
                f"node_parent, tree_position_ids: expected {self.cu_node_lens.device} (of cu_node_lens), "
                f"got {self.node_parent.device}, {self.tree_position_ids.device}"
            )
        bounds, parents = self.cu_node_lens.tolist(), self.node_parent.tolist()
        ids = self.tree_position_ids.tolist()
        for name in ("padded_size", "num_nodes"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"{name}: expected an int, got {type(getattr(self, name)).__name__}")
        if len(parents) != self.num_nodes:
            raise ValueError(
                f"node_parent: expected {self.num_nodes} entries (num_nodes), got {len(parents)}"
            )
        if len(bounds) not in (self.num_nodes + 1, self.num_nodes + 2) or len(bounds) < 2:
            raise ValueError(
                f"cu_node_lens: expected {self.num_nodes + 1} entries (num_nodes + 1), or one more for "
                f"padding, got {len(bounds)}"
            )
        if bounds[0] != 0:
            raise ValueError(f"cu_node_lens: expected to start at 0, got {bounds[0]}")
        for node, (start, end) in enumerate(pairwise(bounds)):
            if end <= start:
                raise ValueError(
                    f"cu_node_lens: expected strictly increasing, got {start} then {end} at node {node}"
                )
        if bounds[-1] != self.padded_size:
            raise ValueError(f"padded_size: expected {bounds[-1]} (cu_node_lens[-1]), got {self.padded_size}")
        if len(ids) != self.padded_size:
            raise ValueError(
                f"tree_position_ids: expected {self.padded_size} entries (padded_size), got {len(ids)}"
            )
        self._check_order(parents)
        if self.roots_only and any(parent >= 0 for parent in parents):
            raise ValueError("roots_only: expected False, for not every node_parent is -1, got True")
        self._check_positions(bounds, parents, ids)
        if self.router_statistics is not None:
            weights_T = self.router_statistics.weights_T
            _check_tensor(weights_T, "router_statistics.weights_T", "float32")
            if weights_T.numel() != self.padded_size or weights_T.device != self.device:
                raise ValueError(
                    f"router_statistics.weights_T: expected {self.padded_size} entries (padded_size) on "
                    f"{self.device}, got {weights_T.numel()} on {weights_T.device}"
                )
        return self

    def validate_once(self) -> None:
        """``validate``, unless this instance has passed it."""
        self.cached("validated", lambda metadata: bool(metadata.validate()))

    def _check_order(self, parents: list[int]) -> None:
        path: list[int] = []
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(f"node_parent: expected -1 or an earlier node for node {node}, got {parent}")
            while path and path[-1] != parent:
                path.pop()
            if parent >= 0 and not path:
                raise ValueError(
                    f"node_parent: expected depth-first preorder, got node {node} with parent {parent}, "
                    "whose subtree had already ended"
                )
            path.append(node)

    def _check_positions(self, bounds: list[int], parents: list[int], ids: list[int]) -> None:
        for node, parent in enumerate(parents):
            start, end = bounds[node], bounds[node + 1]
            first = 0 if parent < 0 else ids[bounds[parent + 1] - 1] + 1
            if ids[start:end] != list(range(first, first + end - start)):
                raise ValueError(
                    f"tree_position_ids: expected {first}..{first + end - start - 1} for node {node} (parent "
                    f"{parent}), got {_abbreviated(ids[start:end])}"
                )
        real = ids[: bounds[self.num_nodes]]
        deepest = max(real, default=0)
        if self.max_position is not None and self.max_position != deepest:
            raise ValueError(f"max_position: expected {deepest}, got {self.max_position}")
        padding = ids[bounds[self.num_nodes] :]
        # Rope and learned tables end at the deepest real position, so padding must not reach past it.
        if padding and not 0 <= min(padding) <= max(padding) <= deepest:
            raise ValueError(
                f"tree_position_ids: expected 0..{deepest} for padding (0 when built by from_nodes), got "
                f"{_abbreviated(padding)}"
            )

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_cache": {}}


def _integers(values: Any, name: str) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    try:
        return [index(value) for value in values]
    except TypeError:
        raise ValueError(f"{name}: expected integers, got {_abbreviated(values)}") from None


def _check_tensor(tensor: torch.Tensor, name: str, dtype: str) -> None:
    got = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    if got != dtype or tensor.dim() != 1:
        shape = list(getattr(tensor, "shape", []))
        raise ValueError(f"{name}: expected a 1-D {dtype} tensor, got {got} of shape {shape}")


def _abbreviated(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"


def _subtree_end(metadata: TreeMetadata) -> torch.Tensor:
    """Last descendant of every node by pointer doubling: log2(N) steps on the device, nothing read back."""
    if metadata.device.type == "cuda":  # the same in two launches
        from megatron.core.transformer.tree_attention import interval_kernels

        return interval_kernels.subtree_end(metadata)
    import torch

    count = metadata.cu_node_lens.numel() - 1
    device = metadata.device
    # Slot `count` is a sink above all roots; the padding node, if any, hangs there too.
    above = torch.full((count + 1,), count, dtype=torch.int64, device=device)
    parents = metadata.node_parent.long()
    above[: metadata.num_nodes] = parents.masked_fill(parents < 0, count)
    last = torch.arange(count + 1, device=device)
    for _ in range(max(count - 1, 0).bit_length()):
        last = last.scatter_reduce(0, above, last, "amax")
        above = above[above]
    bounds = metadata.cu_node_lens
    lengths = (bounds[1:] - bounds[:-1]).long()
    return bounds[1:][last[:count]].repeat_interleave(lengths, output_size=metadata.padded_size)
