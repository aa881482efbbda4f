"""An error of one rank, raised on all: none waits in a collective for one that has given up."""

from __future__ import annotations

import torch.distributed as dist

_KINDS = (ValueError, TypeError, KeyError, OSError)


def agree(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise, on every rank, what failed on any. Collective: a short object from every rank.

    What all ranks say alike is raised as it is. Otherwise the text names the ranks, and the type is the first
    one's if it is ValueError, TypeError, KeyError or OSError, or derived from one; else RuntimeError.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    told: list = [None] * ranks
    mine = None if error is None else _tell(error)
    if ranks == 1:
        told = [mine]
    else:
        dist.all_gather_object(told, mine, group=group)
    if error is not None and told.count(mine) == ranks:
        raise error
    failed = [(rank, *said) for rank, said in enumerate(told) if said is not None]
    if failed:
        kind = next((kind for kind in _KINDS if kind.__name__ == failed[0][1]), RuntimeError)
        raise kind("; ".join(f"rank {rank}: {text}" for rank, _, text in failed)) from error


def _tell(error: Exception) -> tuple[str, str]:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    for kind in _KINDS:
        if isinstance(error, kind):
            return kind.__name__, text
    return RuntimeError.__name__, f"{type(error).__name__}: {text}"
