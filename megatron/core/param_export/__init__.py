"""Parameter export: sharded Megatron parameters as full tensors under Hugging Face names.

    plan = build_plan(model_chunks, hf_config)     # collective
    plan.prove()                                   # collective; raises LayoutError alike on every rank
    for name, tensor in export(plan):              # full tensors, bucket by bucket
        ...
    for name, index, value in export_changed(plan, changed):   # only what changed
        ...

`publisher.Publisher` joins a plan, a sparse diff and weight sync.
"""

from megatron.core.param_export.changed import export_changed
from megatron.core.param_export.exporter import export, load
from megatron.core.param_export.plan import LayoutError, Plan, StalePlanError, build_plan

__all__ = ["LayoutError", "Plan", "StalePlanError", "build_plan", "export", "export_changed", "load"]
