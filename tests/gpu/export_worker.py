"""One of the ranks that load, export and compare checkpoints. test_param_export.py starts them.

    python -m torch.distributed.run --standalone --nproc-per-node=2 tests/gpu/export_worker.py CASES.json

CASES.json: a list of {case, fields, path, groups, te}; te: null for local layers, or what the model of
Transformer Engine's layers has besides. Rank 0 prints one line of JSON.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "build/tree"), str(ROOT)]


def run(fields, path, groups, te):
    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, export, export_changed, load
    from tests.dist.export_models import build
    from tests.dist.world import parallel

    state, hf = load_file(path), SimpleNamespace(**fields)
    with parallel(**groups):
        # the local norms refuse sequence parallelism, which changes no parameter
        more = dict(sequence_parallel=False) if te is None else dict(te=True, **te)
        chunks = build(hf, **more)
        for tensor in (t for chunk in chunks for t in (*chunk.parameters(), *chunk.buffers())):
            if not tensor.is_cuda:  # norms and routers are made on the host
                tensor.data = tensor.data.cuda()
        classes = sorted({type(module).__name__ for chunk in chunks for module in chunk.modules()})
        plan = build_plan(chunks, hf).prove()
        load(plan, state)
        last = dist.get_world_size() - 1
        for receivers in ("all", [last], 0):
            for to_host in (False, True):
                count = 0
                junk = torch.full((1 << 20,), float("nan"), device="cuda")  # poison what is reused
                del junk
                for name, tensor in export(plan, receivers, bucket_bytes=30_000, to_host=to_host):
                    assert tensor.is_cuda != to_host and (tensor.is_pinned() or not to_host)
                    assert torch.equal(tensor.cpu(), state[name]), (name, receivers, to_host)
                    count += 1
                mine = receivers == "all" or dist.get_rank() in ([receivers] if receivers == 0 else receivers)
                assert count == (len(state) if mine else 0)
        held = dict(export(plan, bucket_bytes=30_000))  # a caller may keep them all
        assert all(torch.equal(tensor.cpu(), state[name]) for name, tensor in held.items())
        late = {}
        for name, tensor in export(plan, bucket_bytes=30_000):  # the host runs ahead of a slow caller
            torch.cuda._sleep(200_000)
            late[name] = tensor.clone()
            del tensor  # its memory is used again, but not before that
        assert all(torch.equal(tensor.cpu(), state[name]) for name, tensor in late.items())
        everything = []
        for entry in plan.entries:
            index = torch.arange(entry.tensor.numel(), device="cuda")
            everything.append((entry.tensor, index, entry.tensor.detach().reshape(-1).cuda()))
        found = {name: torch.full_like(tensor, float("nan")) for name, tensor in state.items()}
        for name, index, value in export_changed(plan, everything, receiver=last):
            found[name].view(-1)[index.cpu()] = value.cpu()
        if dist.get_rank() == last:
            assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        return classes, len(plan.schedules)


def main():
    faulthandler.dump_traceback_later(240, exit=True)  # ranks that wait for each other say where
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    results = {}
    for job in json.loads(Path(sys.argv[1]).read_text()):
        classes, schedules = run(job["fields"], job["path"], job["groups"], job["te"])
        results[job["case"]] = dict(classes=classes, schedules=schedules)
    if dist.get_rank() == 0:
        print("FIGURES " + json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
