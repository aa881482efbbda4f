"""Payloads over a torch.distributed group (NCCL or gloo): one sending rank, the other ranks receive.

Every call of :class:`CollectiveTransport` on the sending rank meets one :meth:`CollectiveReceiver.serve` on
each other rank of the group: the group is the sender and the receivers, and nobody else. A payload for all
receivers is broadcast; one for some of them is sent to those alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.weight_sync.payload import Payload
from megatron.weight_sync.receiver import Receiver
from megatron.weight_sync.sender import Ack
from megatron.weight_sync.transport import answers

_CLOSE, _DELIVER, _STATUS = 0, 1, 2
_ANSWER = 2048  # bytes per rank


def connect(address: str, rank: int, size: int, device: str = "cpu", timeout: float = 86400.0):
    """A group of processes that need not share a world: a trainer's sending rank, and rollout processes of
    other jobs. Returns when all of them have called it.

    Megatron takes the whole world for its own (its optimizer gathers over it), so rollout ranks belong in
    another one.

    Args:
        address: ``tcp://HOST:PORT``, where rank 0 of the group listens.
        rank, size: this process's rank in the group, from 0, and how many there are.
        device: "cpu" connects through gloo, "cuda" through NCCL: then every process has a GPU of its own.
        timeout: seconds that one call may take; a receiver's waits for the sender's next.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"an address is tcp://HOST:PORT, got {address!r}")
    if not 0 <= rank < size:
        raise ValueError(f"rank is from 0 to {size - 1} in a group of {size}, got {rank}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is 'cpu' or 'cuda', got {device!r}")
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=limit)
    store = dist.PrefixStore("megatron.weight_sync", store)
    if device == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, size, options)


class _Member:
    """One process of the group. Works on the group's own operations: groups of :func:`connect` are not known
    to torch.distributed's."""

    def __init__(self, group, device: str | None, source: int | None):
        group = dist.group.WORLD if group is None else group
        if not hasattr(group, "rank"):
            raise ValueError(f"rank {dist.get_rank()} is not a member of this group")
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.device = device or ("cuda" if group.name() == "nccl" else "cpu")
        self.source = self.rank if source is None else source
        if not 0 <= self.source < self.size:
            raise ValueError(f"source is a rank in the group of {self.size}, got {self.source}")

    def announce(self, row: torch.Tensor) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = self.source
        self.group.broadcast([row], options).wait()
        return row

    def collect(self, mine: bytes) -> list[bytes]:
        """Every rank's answer, on every rank."""
        row = torch.zeros(_ANSWER, dtype=torch.uint8, device=self.device)
        if mine:
            row[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        self.group.allgather([rows], [row]).wait()
        return [r.cpu().numpy().tobytes().rstrip(b"\0") for r in rows]


class CollectiveTransport(_Member):
    """The sending rank's side.

    Args:
        ranks: receiver id → its rank in the group. Every member but the sender is the rank of one receiver.
        group: the sender and the receivers alone: from :func:`connect`, or a torch.distributed group; None is
            the whole world.
        device: where the backend wants tensors; None: "cuda" for NCCL, "cpu" otherwise.

    Raises:
        ValueError: this rank is not in the group, or a member is nobody's rank, or a rank is not a member's,
            or two receivers'. Every one of these would hang the first call.
    """

    def __init__(self, ranks: Mapping[str, int], group=None, device: str | None = None):
        super().__init__(group, device, None)
        self.ranks = dict(ranks)
        odd = {
            name: rank for name, rank in self.ranks.items() if rank == self.rank or not 0 <= rank < self.size
        }
        if odd:
            raise ValueError(
                f"receivers are other ranks of the group of {self.size}, as the group counts them, got {odd}"
            )
        if len(set(self.ranks.values())) < len(self.ranks):
            raise ValueError(f"every receiver has a rank of its own, got {self.ranks}")
        idle = sorted(set(range(self.size)) - {self.rank, *self.ranks.values()})
        if idle:
            raise ValueError(
                f"ranks {idle} of the group of {self.size} neither send nor receive, and every call would "
                "wait for them: the group is the sender and the receivers alone, see connect()"
            )

    def deliver(self, payload: Payload, receiver_ids: Iterable[str]) -> dict[str, Ack | Exception]:
        names, strange = self._known(receiver_ids)
        containers = [piece.to(self.device) for piece in payload.containers()]
        everyone = self._call(_DELIVER, names, len(containers))
        sizes = torch.tensor([piece.numel() for piece in containers], dtype=torch.int64, device=self.device)
        self.announce(sizes)
        for piece in containers:
            if everyone:
                self.announce(piece)
                continue
            for name in names:
                self.group.send([piece], self.ranks[name], 0).wait()
        return self._answers(names) | strange

    def statuses(self, receiver_ids: Iterable[str]) -> dict[str, Ack | Exception]:
        names, strange = self._known(receiver_ids)
        self._call(_STATUS, names, 0)
        return self._answers(names) | strange

    def close(self) -> None:
        """Let every :meth:`CollectiveReceiver.serve_forever` return."""
        self._call(_CLOSE, [], 0)

    def _known(self, receiver_ids: Iterable[str]) -> tuple[list[str], dict[str, Ack | Exception]]:
        """The receivers that there are, and the answers for others."""
        names = list(receiver_ids)
        strange = {name: answers.unknown(name, self.ranks) for name in names if name not in self.ranks}
        return [name for name in names if name in self.ranks], strange

    def _call(self, what: int, names: list[str], count: int) -> bool:
        """Announce a call; returns whether the payload goes to every other rank."""
        called = {self.ranks[name] for name in names}
        everyone = len(called) == self.size - 1
        row = [what, count, int(everyone), *(int(rank in called) for rank in range(self.size))]
        self.announce(torch.tensor(row, dtype=torch.int64, device=self.device))
        return everyone

    def _answers(self, names: list[str]) -> dict[str, Ack | Exception]:
        rows = self.collect(b"")
        return {name: answers.decode(rows[self.ranks[name]]) for name in names}


class CollectiveReceiver(_Member):
    """A receiving rank's side.

    Args:
        receiver: applies what arrives.
        source: the sending rank in the group.
        group, device: as for :class:`CollectiveTransport`.

    Raises:
        ValueError: this rank is not in the group, or is the source.
    """

    def __init__(self, receiver: Receiver, source: int = 0, group=None, device: str | None = None):
        super().__init__(group, device, source)
        if self.rank == self.source:
            raise ValueError(f"rank {self.rank} of the group is the sender: a receiver is on another rank")
        self.receiver = receiver

    def serve(self) -> Ack | Exception | None:
        """Take part in one call of the sender.

        Returns:
            what this rank answered; None when the call was not for it, or the sender has closed.
        """
        return self._serve()[1]

    def serve_forever(self) -> None:
        """Serve until the sender closes."""
        while self._serve()[0]:
            pass

    def _serve(self) -> tuple[bool, Ack | Exception | None]:
        row = self.announce(torch.zeros(3 + self.size, dtype=torch.int64, device=self.device)).tolist()
        what, count, everyone, called = row[0], row[1], bool(row[2]), bool(row[3 + self.rank])
        if what == _CLOSE:
            return False, None
        containers = []
        if what == _DELIVER:
            sizes = self.announce(torch.zeros(count, dtype=torch.int64, device=self.device)).tolist()
            for size in sizes if everyone or called else ():
                piece = torch.empty(size, dtype=torch.uint8, device=self.device)
                if everyone:
                    self.announce(piece)
                else:
                    self.group.recv([piece], self.source, 0).wait()
                containers.append(piece)
        answer: Ack | Exception | None = None
        if called:
            try:
                answer = self.receiver.apply(containers) if what == _DELIVER else self.receiver.status()
            except Exception as error:
                answer = error
        self.collect(answers.encode(answer, _ANSWER) if answer is not None else b"")
        return True, answer
