"""Parameter export: sharded Megatron parameters as full tensors under Hugging Face names.

    plan = build_plan(model_chunks, AutoConfig.from_pretrained(path))     # collective
    plan.prove()                                   # collective; raises LayoutError alike on every rank
    for name, tensor in export(plan):              # full tensors, bucket by bucket
        ...
    for name, index, value in export_changed(plan, changed):   # only what changed
        ...
    load(plan, tensors)                            # the other way: full tensors into the shards

Names are those of Hugging Face checkpoint files, in all directions. ``hf_model.state_dict()`` has the same,
but for routed experts: transformers 5 fuses them in memory and splits them in files.

Who receives, where, and from what:

    export(plan)                                   # every rank, on its own device
    export(plan, "nodes", to_host=True)            # the first rank of every host, in pinned host memory
    export(plan, 0), export(plan, [0, 8])          # rank 0; these ranks
    export(plan, bucket_bytes=2**28)               # a lower ceiling; two buckets are in memory at a time
    export(plan, read=compat.memory_saver_backups())   # parameters that torch_memory_saver has released

All ranks call it, receivers or not. Build a plan once and keep it: the first export works out the buckets,
later ones exchange tensor bytes only. When parameters were replaced, not when their values changed, an export
raises StalePlanError on every rank: build a new plan.

`checkpoint` writes and reads folders for ``from_pretrained``, `compat` has the functions that trainers call
today, `publisher.Publisher` joins a plan, a sparse diff and a weight-sync sender.
"""

from megatron.core.param_export.changed import export_changed
from megatron.core.param_export.exporter import export
from megatron.core.param_export.loader import load
from megatron.core.param_export.plan import LayoutError, Plan, StalePlanError, build_plan

__all__ = ["LayoutError", "Plan", "StalePlanError", "build_plan", "export", "export_changed", "load"]
