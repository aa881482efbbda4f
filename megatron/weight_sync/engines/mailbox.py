"""Answers of engine workers: where the engine's own calls carry nothing back, workers post them here.

``tcp://HOST:PORT`` is a torch.distributed TCPStore that the trainer hosts; anything else is a folder or URL
that both sides reach.
"""

from __future__ import annotations

import time
from datetime import timedelta

from megatron.weight_sync.transport.store import open_store


class Mailbox:
    """Keys to bytes, written once.

    Args:
        where: ``tcp://HOST:PORT``, folder or URL. Port 0 with ``host=True`` takes a free one: see ``where``.
        host: this process serves the TCP store (the trainer does).
    """

    def __init__(self, where: str, host: bool = False):
        self.where, self._tcp, self._files = str(where), None, None
        if not self.where.startswith("tcp://"):
            self._files = open_store(self.where)
            return
        from torch.distributed import TCPStore

        name, _, port = self.where[len("tcp://") :].rpartition(":")
        if not name or not port.isdigit():
            raise ValueError(f"a mailbox is tcp://HOST:PORT, a folder or a URL, got {self.where!r}")
        self._tcp = TCPStore(name, int(port), is_master=host, wait_for_workers=False)
        self.where = f"tcp://{name}:{self._tcp.port}"

    def post(self, key: str, data: bytes) -> None:
        if self._tcp is not None:
            self._tcp.set(key, data)
        else:
            self._files.put(f"{key}.json", data)

    def read(self, key: str, timeout: float) -> bytes | None:
        """What was posted under ``key``; None if nothing arrives within ``timeout`` seconds."""
        if self._tcp is not None:
            try:
                self._tcp.wait([key], timedelta(seconds=max(timeout, 0.001)))
            except Exception:  # torch raises DistStoreError or RuntimeError, by version
                return None
            return bytes(self._tcp.get(key))
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self._files.get(f"{key}.json").tobytes()
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    return None
                time.sleep(0.01)

    def drop(self, key: str) -> None:
        if self._tcp is not None:
            self._tcp.delete_key(key)
        else:
            self._files.delete(f"{key}.json")
