"""Persistent gloo worlds for the multi-process tests.

A fresh launch of a few ranks costs 10 to 25 seconds, nearly all of it imports. So one world per size is
spawned on first use and runs every case of that size; each case builds its own process groups inside
``with parallel(tp=2, pp=2): …`` and they are gone when it ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

TIMEOUT = 180  # seconds for one case


class World:
    """``size`` ranks that run functions of test files: call it with a module-level function and arguments."""

    def __init__(self, size: int):
        self.size = size
        self._ranks: list = []
        self._pipes: list = []

    def __call__(self, fn, *args: Any, timeout: float = TIMEOUT, **kwargs: Any) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank; the results by rank. Arguments and results are pickled.

        Raises:
            RuntimeError: a rank raised (with the ranks' tracebacks), died, or the case timed out. The world
                is started anew for the next case.
        """
        if not self._ranks:
            self._start()
        job = (sys.modules[fn.__module__].__file__, fn.__qualname__, args, kwargs)
        for pipe in self._pipes:
            pipe.send(job)
        results, failures = {}, {}
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < self.size and time.monotonic() < deadline:
            open_pipes = [p for r, p in enumerate(self._pipes) if r not in results and r not in failures]
            for pipe in wait(open_pipes, timeout=max(0.0, deadline - time.monotonic())):
                rank = self._pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process died"
                (results if ok else failures)[rank] = value
                if not ok:  # the others may wait for this rank forever
                    deadline = min(deadline, time.monotonic() + 5)
        if len(results) == self.size:
            return [results[rank] for rank in range(self.size)]
        hung = [rank for rank in range(self.size) if rank not in results and rank not in failures]
        for rank in hung:
            os.kill(self._ranks[rank].pid, signal.SIGUSR1)  # prints where it stands
        time.sleep(0.5 if hung else 0)
        self.close()
        told = "".join(f"\n--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items()))
        raise RuntimeError(f"{fn.__qualname__} failed; ranks that did not finish: {hung}{told}")

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        fd, rendezvous = tempfile.mkstemp(prefix="world-")
        os.close(fd)
        os.unlink(rendezvous)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, rendezvous, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        for process in self._ranks:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._ranks, self._pipes = [], []


def _serve(rank: int, size: int, rendezvous: str, pipe) -> None:
    """One rank's life: set up gloo on CPU, then run what comes through the pipe."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    faulthandler.register(signal.SIGUSR1)
    import torch
    import torch.distributed as dist

    import megatron.cpu_runtime

    torch.set_num_threads(1)
    megatron.cpu_runtime.install()
    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, size), rank=rank, world_size=size)
    while True:
        try:
            path, qualname, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            target = _load(path)
            for part in qualname.split("."):
                target = getattr(target, part)
            answer = (True, target(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except Exception:
            pipe.send((False, traceback.format_exc()))


def _load(path: str):
    """The test file as a module, loaded once per rank."""
    name = "_world_case_" + Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@contextlib.contextmanager
def parallel(tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int | None = None,
             cp: int = 1, seed: int = 1234, **options: Any):
    """Megatron's process groups and random states for a case; ``options`` go to initialize_model_parallel."""
    import torch
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    _release_models()
    before = set(dist.distributed_c10d._world.pg_map)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        context_parallel_size=cp,
        **options,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        # In the order of their creation, the same on every rank: under NCCL ranks wait for each other here.
        for group in list(dist.distributed_c10d._world.pg_map):
            if group not in before:
                dist.destroy_process_group(group)


def _release_models() -> None:
    """Let go of earlier cases' models: they hold process groups, and every gloo group has threads.

    Upstream's DistributedDataParallel hangs hooks that know it on autograd nodes, a cycle through C++ that
    the garbage collector cannot see; and rotary embeddings stay in the cache of their own forward.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    for thing in gc.get_objects():
        if issubclass(type(thing), DistributedDataParallel):  # isinstance would follow dead weak proxies
            vars(thing).clear()
    RotaryEmbedding.forward.cache_clear()
    gc.collect()
