"""The rollout side: payloads into live weights, all or nothing.

``apply`` goes through five stages: *verify* every byte, name, shape and version; *stage* what will be
written, and keep what it replaces; *write*; *fingerprint* all live weights; *acknowledge*. An error in the
first two leaves the weights untouched; an error in the next two puts the kept values back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron.weight_sync import codec
from megatron.weight_sync.boxes import Box
from megatron.weight_sync.errors import (
    CorruptPayload,
    FingerprintMismatch,
    IncompletePayload,
    LayoutMismatch,
    MissingTensor,
    MissingVersion,
    PeerFailed,
    ReceiverPoisoned,
    RepeatedVersion,
    UnknownTensor,
    UnsupportedLayout,
    WrongBase,
    WrongModel,
)
from megatron.weight_sync.fingerprints import (
    MODULUS,
    add,
    bits_of,
    fingerprint_boxes,
    kernels_for,
    signed,
    total,
)
from megatron.weight_sync.payload import Manifest, Payload, Record, read_bucket, read_manifest
from megatron.weight_sync.sender import Ack

_DENSE = "ask the sender for a dense payload"
_KNOWN = "acknowledge with status(), or ask the sender for a dense payload of a later version"


@dataclass(frozen=True)
class Target:
    """Where one named tensor lives: pieces of live storage, each a one-dimensional view and a box into it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[torch.Tensor, Box], ...]


@dataclass
class _Write:
    """Elements of one live storage: positions (None: all that the box covers) and their new and old bits."""

    name: str
    live: torch.Tensor
    box: Box
    position: torch.Tensor | None
    new: torch.Tensor
    old: torch.Tensor | None = None
    touched: bool = False

    def store(self, keep: bool) -> None:
        """Write the new bits; the old ones are kept first."""
        if keep and self.old is None:
            self.old = _read(self).clone()
        self.touched = True
        _store(self, self.new)

    def put_back(self) -> None:
        if not self.touched:
            return
        if self.old is None:
            raise RuntimeError("replaced values were not kept (keep_undo=False)")
        _store(self, self.old)


class _SwapWrite:
    """Many tensors' changes at once, by a kernel that keeps what it replaces."""

    def __init__(self, swap):
        self._swap, self._touched = swap, False

    def store(self, keep: bool) -> None:
        self._touched = True
        self._swap.store()

    def put_back(self) -> None:
        if self._touched:
            self._swap.put_back()


class Peers:
    """The ranks of one sharded receiver.

    Args:
        group: their torch.distributed process group.
        device: where its backend wants tensors: "cuda" for NCCL.
    """

    def __init__(self, group=None, device="cpu"):
        self.group, self.device = group, device

    def agree(self, good: bool) -> bool:
        """Whether ``good`` on every rank."""
        flag = torch.tensor([int(good)], dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=self.group)
        return bool(flag.item())

    def add(self, values: Mapping[str, int], names: list[str]) -> dict[str, int]:
        """Sums over the ranks modulo 2**64, by name."""
        row = torch.tensor([signed(values[n]) for n in names], dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(row, group=self.group)
        return {name: value % MODULUS for name, value in zip(names, row.tolist(), strict=True)}


class Receiver:
    """Applies payloads to live storage described by targets.

    Args:
        targets: name → :class:`Target`, for every name a payload may use.
        groups: what a dense sync must cover: the names of one group share storage (tied weights), and one of
            them is enough. By default every name is a group of its own.
        peers: the ranks that hold one sharded model together; None when this process holds full tensors. All
            of them apply a payload, or none does.
        keep_undo: whether a dense sync keeps the replaced values until it is proven, at the price of a copy
            of the model while it runs. Without it, a dense sync that fails while writing poisons the
            receiver.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        *,
        groups: Iterable[Iterable[str]] | None = None,
        peers: Peers | None = None,
        keep_undo: bool = True,
    ):
        self.peers = peers
        self.keep_undo = keep_undo
        self.model_id: str | None = None
        self.lineage: int | None = None
        self.version: int | None = None
        self.poisoned = False
        self._cause = ""  # of being poisoned, as far as known
        self._expected: dict[str, int] = {}  # per-tensor sums of the version held
        self._sums = None
        self._bind(targets, groups)

    def _bind(
        self,
        targets: Mapping[str, Target],
        groups: Iterable[Iterable[str]] | None,
        places: dict[str, tuple] | None = None,
    ) -> None:
        self.targets = dict(targets)
        self._bound = places or {}
        self.groups = [tuple(group) for group in groups or [[name] for name in self.targets]]
        self._group_of = {name: i for i, group in enumerate(self.groups) for name in group}
        self._copies = self._count_copies() if self.targets else {}

    # ---- state ---------------------------------------------------------------------------------------------

    def status(self) -> Ack:
        """What this receiver holds. The live weights are fingerprinted now; if they are not what was applied,
        or live tensors were replaced by others, the receiver is poisoned from here on."""
        if self._holds_still() and self._wrong(self._expected):
            self.poisoned = True
        if self.version is None or self.poisoned:
            return Ack(self.model_id, self.lineage, None, 0, self.poisoned)
        return Ack(self.model_id, self.lineage, self.version, total(self._expected))

    def _holds_still(self) -> bool:
        """Whether this receiver held a version when it was last asked, in the tensors that are live now. If
        it held one in others, it is poisoned from here on."""
        if self.version is None or self.poisoned:
            return False
        if self._in_place():
            return True
        self.poisoned, self._cause = True, f" ({self._replaced()})"
        return False

    def _places(self) -> dict[str, tuple]:
        """Where the live tensors are now, by name, for receivers that can look them up."""
        return {}

    def _in_place(self) -> bool:
        """Whether the live tensors are, on every rank, those that the targets were made for."""
        same = self._places() == self._bound
        return same if self.peers is None else self.peers.agree(same)

    def _replaced(self) -> str:
        now = self._places()
        names = [name for name in {**self._bound, **now} if self._bound.get(name) != now.get(name)]
        if not names:
            return "tensors of another rank were replaced"
        return f"{len(names)} tensors were replaced by others since they were written: {names[:5]}"

    def live_fingerprint(self, names: Iterable[str] | None = None) -> dict[str, int]:
        """Per-tensor sums over the live weights: of all ranks, with as many copies as they hold together.

        Raises:
            ReceiverPoisoned: the live tensors were replaced, and only a dense sync finds the new ones.
        """
        if self.targets and not self._in_place():
            raise ReceiverPoisoned(f"{self._replaced()}: dense sync needed")
        return self._live_sums(list(self.targets if names is None else names))

    def _live_sums(self, names: list[str]) -> dict[str, int]:
        share = {**dict.fromkeys(names, 0), **self._share(names)}
        return self.peers.add(share, names) if self.peers is not None else share

    def _share(self, names: list[str]) -> dict[str, int]:
        """This process's share. On a GPU the table of pieces is built once: their addresses do not change."""
        pieces = [piece for name in names for piece in self.targets[name].pieces]
        kernels = kernels_for(pieces[0][0]) if pieces else None
        same = {(live.device, live.is_cuda) for live, _ in pieces}
        if kernels is None or len(same) != 1 or not all(kernels.few_loops(box) for _, box in pieces):
            return fingerprint_boxes((live, [box]) for live, box in pieces)
        key = tuple(live.data_ptr() for live, _ in pieces)
        if self._sums is None or self._sums[0] != key:
            self._sums = (key, kernels.BoxSums(pieces))
        values = self._sums[1]().tolist()
        return add(*({box.full_name: v} for (_, box), v in zip(pieces, values, strict=True)))

    def _wrong(self, expected: Mapping[str, int]) -> list[str]:
        sums = self._live_sums(list(expected))
        return [
            name for name, value in expected.items() if sums[name] != value * self._copies[name] % MODULUS
        ]

    def _count_copies(self) -> dict[str, int]:
        """How often each full tensor is held over all ranks: norms, and KV heads fewer than ranks, are
        copies."""
        held = {name: sum(box.numel for _, box in target.pieces) for name, target in self.targets.items()}
        if self.peers is not None:
            held = self.peers.add(held, list(self.targets))
        copies = {}
        for name, target in self.targets.items():
            numel = math.prod(target.shape)
            copies[name], rest = divmod(held[name], numel) if numel else (1, 0)
            if rest or not copies[name]:
                raise UnsupportedLayout(
                    f"{name}: the ranks hold {held[name]} of its {numel} elements unchanged "
                    "(repacked, quantised?)"
                )
        return copies

    # ---- apply ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, payload: Payload | Iterable) -> Ack:
        """Apply a payload to the live weights.

        Args:
            payload: a :class:`Payload`, or its containers (bytes-like or uint8 tensors, in any order).

        Returns:
            the acknowledgement for ``Sender.acknowledge``.

        Raises:
            WeightSyncError: of the kind that says what is wrong. The live weights are exactly as before,
                unless it is :class:`ReceiverPoisoned`.
            TypeError: ``payload`` is neither.
        """
        manifest, writes = self._together(lambda: self._prepare(payload))
        expected = {**({} if manifest.dense else self._expected), **manifest.sums}
        done: list[_Write] = []
        try:
            self._together(lambda: self._write(writes, done, manifest))
            in_place = self._in_place()
            wrong = self._wrong(expected) if in_place else []
        except BaseException:
            self._take_back(done, manifest)
            raise
        if not in_place:
            text = f"{self._replaced()}, while version {manifest.version} was applied"
            self._take_back(done, manifest)
            self.poisoned, self._cause = True, f" ({text})"
            raise ReceiverPoisoned(f"{text}: dense sync needed")
        if wrong or total(expected) != manifest.fingerprint:
            self._take_back(done, manifest)
            raise self._mismatch(wrong, manifest)
        self.model_id, self.lineage, self.version = manifest.model_id, manifest.lineage, manifest.version
        self._expected = expected
        self.poisoned, self._cause = False, ""
        return Ack(self.model_id, self.lineage, self.version, manifest.fingerprint)

    def _together(self, step: Callable):
        """Run one stage; with peers, it counts as failed everywhere if it failed anywhere."""
        if self.peers is None:
            return step()
        error, out = None, None
        try:
            out = step()
        except Exception as caught:
            error = caught
        if self.peers.agree(error is None):
            return out
        raise error if error is not None else PeerFailed("another rank of this receiver refused the payload")

    def _prepare(self, payload: Payload | Iterable) -> tuple[Manifest, list[_Write]]:
        if not isinstance(payload, Payload):
            one = isinstance(payload, (str, bytes, bytearray, torch.Tensor))
            if one or not isinstance(payload, Iterable):
                raise TypeError(
                    "payload: expected a Payload or the list of its containers that to_bytes() returns, got "
                    f"{type(payload).__name__}"
                )
            payload = Payload.from_bytes(payload)
        manifest = read_manifest(payload.manifest)
        self._check_version(manifest)
        return manifest, self._stage_all(self._verify(payload, manifest))

    def _check_version(self, manifest: Manifest) -> None:
        if self.model_id is not None and manifest.model_id != self.model_id:
            raise WrongModel(f"payload is for model {manifest.model_id[:80]!r}, this is {self.model_id!r}")
        held, lineage = self.version, self.lineage
        if manifest.dense:
            stale = lineage is not None and (manifest.lineage, manifest.version) < (lineage, held or 0)
            same = held is not None and (manifest.lineage, manifest.version) == (lineage, held)
            if stale or (same and not self.poisoned):
                raise RepeatedVersion(
                    f"dense payload is version {manifest.version} of lineage {manifest.lineage}, "
                    f"this receiver holds {held} of {lineage}; {_KNOWN}"
                )
            return
        first, last = manifest.base
        if self.poisoned:
            raise ReceiverPoisoned(
                f"this receiver's weights are no known version{self._cause}: it needs a dense sync"
            )
        if held is None:
            raise WrongBase(
                f"delta {first}-{last} → {manifest.version}: this receiver holds nothing yet; {_DENSE}"
            )
        if manifest.lineage != lineage:
            raise WrongBase(
                f"delta of lineage {manifest.lineage}, this receiver holds {held} of {lineage}; {_DENSE}"
            )
        if held >= manifest.version:
            raise RepeatedVersion(
                f"delta to version {manifest.version}, this receiver holds {held}; {_KNOWN}"
            )
        if held < first:
            raise MissingVersion(f"delta from version {first}, this receiver still holds {held}; {_DENSE}")
        if held > last:
            raise WrongBase(f"delta from version {first} to {last}, this receiver holds {held}; {_DENSE}")

    def _verify(self, payload: Payload, manifest: Manifest) -> list[Record]:
        if len(payload.buckets) != len(manifest.buckets):
            raise IncompletePayload(f"{len(payload.buckets)} of {len(manifest.buckets)} buckets are there")
        records: dict[str, Record] = {}
        for data in payload.buckets:
            for record in read_bucket(data, manifest, self._check_tensor):
                if record.name in records:
                    raise CorruptPayload(f"{record.name}: twice in one payload")
                records[record.name] = record
        if set(records) != set(manifest.sums):
            odd = sorted(set(records) ^ set(manifest.sums))
            raise IncompletePayload(f"manifest and buckets do not list the same tensors: {odd[:10]}")
        if manifest.dense:
            missing = [group[0] for group in self.groups if not any(name in records for name in group)]
            if missing:
                raise MissingTensor(
                    f"a dense sync needs every tensor; {len(missing)} are missing: {missing[:10]}"
                )
        else:
            extra = sorted(set(records) - set(self._expected))
            if extra:
                raise UnknownTensor(f"delta names tensors that the dense sync did not send: {extra[:10]}")
        self._check_tied(records)
        return list(records.values())

    def _check_tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        target = self.targets.get(name)
        if target is None:
            raise UnknownTensor(f"{name}: this receiver has no such tensor")
        if (shape, dtype) != (target.shape, target.dtype):
            raise LayoutMismatch(
                f"{name}: payload has {dtype} {list(shape)}, receiver has {target.dtype} {list(target.shape)}"
            )

    def _check_tied(self, records: dict[str, Record]) -> None:
        """Names that share storage must say the same; otherwise the last one written would win."""
        first: dict[int, Record] = {}
        for record in records.values():
            other = first.setdefault(self._group_of[record.name], record)
            if other is record:
                continue
            same = (other.index is None, other.relative) == (record.index is None, record.relative)
            same = same and torch.equal(other.bits, record.bits)
            if same and other.index is not None:
                same = torch.equal(other.index, record.index)
            if not same:
                raise LayoutMismatch(
                    f"{other.name} and {record.name} share storage here, but their values differ"
                )

    def _stage_all(self, records: list[Record]) -> list:
        """What the records write into this process's storage; allocates O(changed)."""
        writes, swaps, seen = [], {}, set()
        for record in records:
            group = self._group_of[record.name]
            if group in seen:
                continue  # tied weights, which say the same
            seen.add(group)
            for live, box in self.targets[record.name].pieces:
                kernels = kernels_for(live)
                if record.index is None or kernels is None or not kernels.few_loops(box):
                    writes += self._stage(record, live, box)
                elif record.count:
                    index, base = record.index_list(live.device)
                    change = kernels.Change(live, box, index, record.bits.to(live.device), base)
                    key = (live.device, live.element_size(), record.relative)
                    swaps.setdefault(key, []).append(change)
        for (_, _, relative), changes in swaps.items():
            writes.append(_SwapWrite(kernels_for(changes[0].live).Swap(changes, relative)))
        return writes

    def _stage(self, record: Record, live: torch.Tensor, box: Box) -> list[_Write]:
        bits = record.bits.to(live.device)
        if record.index is None:
            view = bits.as_strided(box.size, box.full_stride, bits.storage_offset() + box.full_offset)
            return [_Write(record.name, live, box, None, view)]
        position, values = _locate(record.index.to(live.device), bits, box, record.numel)
        if position.numel() == 0:
            return []
        write = _Write(record.name, live, box, position, values)
        if record.relative:
            write.old = _read(write)
            write.new = codec.ulp_apply(write.old, values)
        return [write]

    def _write(self, writes: list[_Write], done: list[_Write], manifest: Manifest) -> None:
        """Write, and note in ``done`` what :meth:`_undo` has to put back."""
        keep = self.keep_undo or not manifest.dense
        for write in writes:
            done.append(write)
            write.store(keep)
        self._after_writing()

    def _after_writing(self) -> None:
        """A hook for what is derived from weights; runs after values were written, and after they were put
        back."""

    def _take_back(self, done: list[_Write], manifest: Manifest) -> None:
        """Undo on every rank; where that fails on any, all are poisoned."""
        try:
            self._together(lambda: self._undo(done))
        except BaseException as error:
            self.poisoned = True
            raise ReceiverPoisoned(
                f"version {manifest.version} failed half-way and could not be taken back ({error}): "
                "dense sync needed"
            ) from error

    def _undo(self, done: list[_Write]) -> None:
        for write in reversed(done):
            write.put_back()
        self._after_writing()

    def _mismatch(self, wrong: list[str], manifest: Manifest) -> Exception:
        """After an undo: were the weights right before? If not, something else has written to them."""
        text = f"version {manifest.version}: {len(wrong)} tensors differ from the sender's: {wrong[:10]}"
        if not wrong:
            text = (
                f"version {manifest.version}: tensors that the payload does not carry have changed on the "
                "sender's side too (per-tensor fingerprints do not add up to the total)"
            )
        if not manifest.dense:
            text += "; where they were written outside the optimizer, call invalidate() of its sparse diff"
        if self.version is not None and not self.poisoned:
            drifted = self._wrong(self._expected)
            if drifted:
                self.poisoned = True
                return ReceiverPoisoned(
                    f"the weights had drifted from version {self.version} before this update: "
                    f"{drifted[:10]}; "
                    "dense sync needed"
                )
        return FingerprintMismatch(text, wrong)


def _locate(
    index: torch.Tensor, bits: torch.Tensor, box: Box, numel: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Full flat indices → positions in live storage, and the values of those that lie in the box."""
    if box.size == (numel,) and box.local_stride == box.full_stride == (1,):
        return index + box.local_offset if box.local_offset else index, bits
    inside, position = box.map_to_local(index)
    return position, bits[inside]


def _read(write: _Write) -> torch.Tensor:
    bits = bits_of(write.live)
    if write.position is not None:
        return bits.index_select(0, write.position)
    box = write.box
    return bits.as_strided(box.size, box.local_stride, bits.storage_offset() + box.local_offset)


def _store(write: _Write, values: torch.Tensor) -> None:
    bits = bits_of(write.live)
    if write.position is not None:
        bits.scatter_(0, write.position, values)  # positions are unique
        return
    box = write.box
    bits.as_strided(box.size, box.local_stride, bits.storage_offset() + box.local_offset).copy_(values)


def whole_box(name: str, shape: tuple[int, ...], stride: tuple[int, ...] | None = None) -> Box:
    """The box of a tensor that lives whole, with ``stride`` elements between neighbours (default:
    contiguous)."""
    full = torch.empty(shape, device="meta").stride()
    if stride is None or tuple(stride) == tuple(full):
        numel = torch.Size(shape).numel()
        return Box(name, (numel,), 0, (1,), 0, (1,))
    return Box(name, tuple(shape), 0, tuple(stride), 0, tuple(full))


class ModuleReceiver(Receiver):
    """A receiver for any ``nn.Module`` whose ``state_dict`` names are the payload's: ``transformers`` models.

    Parameters and persistent buffers are written in place, so optimiser-free generation code, compiled graphs
    and CUDA graphs keep working. Tied weights have several names; the payload may use any one of them, or
    several with equal values.

    The module may get other tensors in their place (``module.to``, ``parameter.data = …``, ``setattr``,
    ``load_state_dict(assign=True)``): then what it holds is no known version, and the next dense payload goes
    into the tensors that it has by then.
    """

    def __init__(self, module: torch.nn.Module, **kwargs):
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
        self.module = module
        targets, groups, places = _targets_of(module)
        super().__init__(targets, groups=groups, **kwargs)
        self._bound = places

    def live_fingerprint(self, names: Iterable[str] | None = None) -> dict[str, int]:
        """As :meth:`Receiver.live_fingerprint`, over the tensors that the module has now."""
        self._follow()
        return super().live_fingerprint(names)

    @torch.no_grad()
    def apply(self, payload: Payload | Iterable) -> Ack:
        """As :meth:`Receiver.apply`.

        Raises:
            UnsupportedLayout: the module has tensors by now that no update can reach; nothing was written.
        """
        self._follow()
        return super().apply(payload)

    def _places(self) -> dict[str, tuple]:
        return {name: _place(tensor) for name, tensor in self.module.state_dict(keep_vars=True).items()}

    def _follow(self) -> None:
        """Take the tensors that the module has now."""
        if self._holds_still() or self._in_place():
            return
        self._bind(*self._together(lambda: _targets_of(self.module)))


def _targets_of(module: torch.nn.Module) -> tuple[dict[str, Target], list[list[str]], dict[str, tuple]]:
    """Targets, the names that share storage, and the places of a module's tensors."""
    targets, by_storage, places = {}, {}, {}
    state, again = module.state_dict(keep_vars=True), module.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedLayout(f"{name}: state of type {type(tensor).__name__} cannot be updated")
        tensor = tensor.detach()
        odd = tensor.device.type == "meta" or tensor.is_sparse or tensor.is_quantized
        if odd or is_traceable_wrapper_subclass(tensor):
            kind = tensor.layout if type(tensor) is torch.Tensor else type(tensor).__name__
            raise UnsupportedLayout(f"{name}: a {kind} tensor on {tensor.device} cannot be updated")
        places[name] = _place(tensor)
        if places[name] != _place(again[name]):
            raise UnsupportedLayout(f"{name}: state_dict() makes a copy of it, no update reaches the module")
        span = _span(tensor)
        if (tensor.storage_offset() + span) * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UnsupportedLayout(f"{name}: its storage is freed (offloaded?), it cannot be updated")
        live = tensor.as_strided((span,), (1,), tensor.storage_offset())
        stride = None if tensor.is_contiguous() else tensor.stride()
        targets[name] = Target(
            tuple(tensor.shape), tensor.dtype, ((live, whole_box(name, tuple(tensor.shape), stride)),)
        )
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else name
        by_storage.setdefault(key, []).append(name)
    return targets, list(by_storage.values()), places


def _place(tensor: object) -> tuple:
    """Says whether a tensor is where it was: a storage that is written to stays alive, so none other has its
    address."""
    if not isinstance(tensor, torch.Tensor) or is_traceable_wrapper_subclass(tensor):
        return (type(tensor),)
    address = 0 if tensor.device.type == "meta" or tensor.is_sparse else tensor.data_ptr()
    return address, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _span(tensor: torch.Tensor) -> int:
    """Storage elements from the first to the last element of ``tensor``."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
