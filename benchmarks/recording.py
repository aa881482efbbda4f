"""Where benchmark figures go: results/<gpu>/<version>/<op>.json, and the same as a Markdown table beside
it."""

import datetime
import json
import platform
import re
import shlex
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def device_name():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu {platform.machine()}"


def milliseconds(run, repeats=10, warmup=3, prepare=lambda: None):
    """Median time of ``run()``, each after an untimed ``prepare()``: device events on CUDA, the wall clock
    otherwise.

    On CUDA all calls are queued behind a pause, so that the device never waits for the host in between: what
    is measured is device time, not launch time.
    """
    for _ in range(warmup):
        prepare()
        run()
    if not torch.cuda.is_available():
        times = []
        for _ in range(repeats):
            prepare()
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)
    torch.cuda.synchronize()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda._sleep(20_000_000)  # about 10 ms of head start for the host
    for begin, end in marks:
        prepare()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def in_turns(runs, rounds=4, repeats=8):
    """{name: median milliseconds} of several calls that take turns, so that the clock of a device under load,
    which falls as it warms up, is the same for all of them. All run for half a second before that."""
    times = {name: [] for name in runs}
    begin = time.perf_counter()
    while torch.cuda.is_available() and time.perf_counter() - begin < 0.5:
        for run in runs.values():
            milliseconds(run, 4, warmup=0)
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(milliseconds(run, repeats, warmup=1))
    return {name: statistics.median(found) for name, found in times.items()}


def installed_versions():
    versions = {"python": platform.python_version()}
    for name in ("torch", "triton", "megatron-core", "transformer-engine", "flash-attn-4", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def free_path(results, gpu, fork_version, operation):
    """Where the next result of an operation goes: never over an earlier one."""
    folder = results / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") / fork_version
    folder.mkdir(parents=True, exist_ok=True)
    number, path = 1, folder / f"{operation}.json"
    while path.exists():
        number += 1
        path = folder / f"{operation}-{number}.json"
    return path


class Recording:
    """Rows {case, metric, value, unit, reference, ratio, limit}, printed as they come and written at the end.

    reference: the figure that `ratio` is against, from the same run, or its name. limit: the bound by bytes
    or FLOPs.
    """

    def __init__(self, operation):
        self.operation, self.rows = operation, []

    def add(self, case, metric, value, unit, reference=None, ratio=None, limit=None):
        if ratio is None and isinstance(reference, int | float) and reference:
            ratio = value / reference
        row = dict(
            case=case, metric=metric, value=value, unit=unit, reference=reference, ratio=ratio, limit=limit
        )
        self.rows.append(row)
        print(" ".join(f"{k}={_short(v)}" for k, v in row.items() if v is not None), flush=True)

    def write(self):
        """Never over an earlier result: a new run of the same version gets a number."""
        versions, gpu = installed_versions(), device_name()
        import megatron.core

        path = free_path(RESULTS, gpu, megatron.core.__version__, self.operation)
        command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        head = dict(gpu=gpu, versions=versions, command=command, date=date)
        path.write_text(json.dumps({**head, "rows": self.rows}, indent=1) + "\n")
        columns = ["case", "metric", "value", "unit", "reference", "ratio", "limit"]
        lines = [f"{gpu}, {date}, `{command}`", "", ", ".join(f"{k} {v}" for k, v in versions.items()), ""]
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(_short(row[c]) for c in columns) + " |" for row in self.rows]
        path.with_suffix(".md").write_text("\n".join(lines) + "\n")
        print(f"wrote {path}")


def _short(value):
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
