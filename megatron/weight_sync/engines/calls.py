"""What a trainer asks of engine workers, and how their answers come back.

A call travels through whatever the engine offers for weight updates, as named uint8 tensors: the call itself
(JSON), and the payload's containers. Every worker rank answers into a mailbox, since those interfaces return
nothing.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping

import torch

from megatron.weight_sync.container import parse_json
from megatron.weight_sync.engines.mailbox import Mailbox
from megatron.weight_sync.errors import CorruptPayload, PeerFailed
from megatron.weight_sync.payload import Payload
from megatron.weight_sync.receiver import Receiver
from megatron.weight_sync.sender import Ack
from megatron.weight_sync.transport import answers

CALL = "megatron.weight_sync/call"
CONTAINER = "megatron.weight_sync/container"

Named = list[tuple[str, torch.Tensor]]
Received = Iterable[tuple[str, torch.Tensor | Callable[[], torch.Tensor]]]


class EngineTransport:
    """The trainer's side: a transport for :func:`~megatron.weight_sync.session.synchronise`.

    Args:
        send: ``send(receiver_id, named)`` hands named uint8 tensors to one engine, which passes them to every
            rank.
        ranks: receiver id → number of its worker ranks.
        mailbox: ``tcp://HOST:PORT`` (hosted here; port 0 takes a free one), or a folder or URL.
        timeout: seconds to wait for all ranks' answers.
    """

    def __init__(
        self,
        send: Callable[[str, Named], object],
        ranks: Mapping[str, int],
        mailbox: str = "tcp://127.0.0.1:0",
        timeout: float = 300.0,
    ):
        self.send, self.ranks, self.timeout = send, dict(ranks), timeout
        self.mailbox = Mailbox(mailbox, host=True)

    def deliver(self, payload: Payload, receiver_ids: Iterable[str]) -> dict[str, Ack | Exception]:
        containers = [(f"{CONTAINER}/{k:05d}", piece) for k, piece in enumerate(payload.containers())]
        return {name: self._call(name, "apply", containers) for name in receiver_ids}

    def statuses(self, receiver_ids: Iterable[str]) -> dict[str, Ack | Exception]:
        return {name: self._call(name, "status", []) for name in receiver_ids}

    def _call(self, name: str, what: str, containers: Named) -> Ack | Exception:
        if name not in self.ranks:
            return answers.unknown(name, self.ranks)
        key = secrets.token_hex(8)
        text = json.dumps({"do": what, "key": key, "mailbox": self.mailbox.where}).encode()
        call = (CALL, torch.frombuffer(bytearray(text), dtype=torch.uint8))
        failed = None
        try:
            self.send(name, [call, *containers])
        except Exception as error:
            failed = error  # some ranks may have answered all the same: their word counts more
        said = []
        for rank in range(self.ranks[name]):
            data = self.mailbox.read(f"{key}/{rank}", 0.0 if failed is not None else self.timeout)
            said.append(TimeoutError(f"rank {rank} did not answer") if data is None else answers.decode(data))
            if data is not None:
                self.mailbox.drop(f"{key}/{rank}")
        return failed if failed is not None and _all(said, TimeoutError) else joint(said)


def _all(said: list, kind: type) -> bool:
    return all(isinstance(answer, kind) for answer in said)


def joint(said: list[Ack | Exception]) -> Ack | Exception:
    """One answer for an engine out of its ranks' answers: the acknowledgement that all of them gave,
    otherwise the error that is the cause."""
    errors = [answer for answer in said if isinstance(answer, Exception)]
    if not errors:
        if any(answer != said[0] for answer in said):
            return RuntimeError(f"the engine's ranks hold different versions: {said}")
        return said[0]
    causes = [error for error in errors if not isinstance(error, PeerFailed | TimeoutError)]
    return (causes or errors)[0]


def serve(named: Received, rank: int, receiver: Callable[[], Receiver]) -> Ack | Exception:
    """A worker rank's side: do what a call asks, and answer.

    Args:
        named: what :class:`EngineTransport` sent; a function in place of a tensor is called when the receiver
            reads it, so that one rank that cannot open its tensor does not leave the others waiting.
        rank: this worker's rank within the engine.
        receiver: makes or finds this rank's receiver; what it raises is the answer, too.

    Returns:
        the answer, which is in the mailbox as well. Errors are returned and not raised, because engines end
        their process when an update raises.

    Raises:
        CorruptPayload: there is no call among the tensors, so nobody to answer to.
    """
    containers, call = [], None
    for name, tensor in named:
        if name == CALL:
            call = parse_json(_opened(tensor).cpu().numpy().tobytes())
        elif name.startswith(CONTAINER):
            containers.append(tensor)
    whole = isinstance(call, dict) and all(isinstance(call.get(key), str) for key in ("do", "key", "mailbox"))
    if not whole or call["do"] not in ("apply", "status"):
        raise CorruptPayload("these tensors are no weight-sync call")
    try:
        answer = receiver().apply(map(_opened, containers)) if call["do"] == "apply" else receiver().status()
    except Exception as error:
        answer = error
    Mailbox(call["mailbox"]).post(f"{call['key']}/{rank}", answers.encode(answer))
    return answer


def key_of(named: Received) -> str | None:
    """The key of the call among the tensors: one delivery has one key. None if there is no call."""
    for name, tensor in named:
        if name == CALL:
            call = parse_json(_opened(tensor).cpu().numpy().tobytes())
            return call.get("key") if isinstance(call, dict) else None
    return None


def _opened(tensor: torch.Tensor | Callable[[], torch.Tensor]) -> torch.Tensor:
    return tensor() if callable(tensor) else tensor


def receiver_of(model: torch.nn.Module, make: Callable[[], Receiver]) -> Receiver:
    """The receiver that belongs to a live model, made at the first call and kept with it."""
    receiver = model.__dict__.get("_weight_sync_receiver")
    if receiver is None:
        receiver = model.__dict__["_weight_sync_receiver"] = make()
    return receiver


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a model by name, without duplicates."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
