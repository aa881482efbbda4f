"""Writes the outcomes of a full run of test_param_export_families.py to a Markdown file."""

import datetime
from pathlib import Path

from benchmarks.recording import installed_versions
from patchset import ROOT, backend

FILE = Path(__file__).with_name("param_export_layouts.md")
COMMAND = "TEST_FULL=1 RECORD=1 python -m pytest tests/dist/test_param_export_families.py"


def write(wanted, outcomes, layouts, have_te, file=FILE):
    """A table of families and layouts for each kind of layers.

    Args:
        wanted: ``(family, layout, layers)`` that the run should have had.
        outcomes: the same -> "passed", "refused" or "FAILED".
        layouts: the columns.

    Raises:
        RuntimeError: Transformer Engine is not installed, or cases did not run: such a run is no record.
    """
    if not have_te or not set(wanted) <= outcomes.keys():
        raise RuntimeError("not recorded: the whole product must run, with Transformer Engine installed")
    versions = installed_versions() | {"megatron-core": backend.version(ROOT)}
    versions = ", ".join(f"{name} {number}" for name, number in versions.items())
    lines = [
        "# Parameter export: families and layouts",
        "",
        f"{datetime.datetime.now(datetime.UTC).date().isoformat()}, `{COMMAND}`, {versions}.",
        "",
        "Written by the run; not edited. *passed*: Hugging Face weights load into the shards and export bit",
        "for bit, and with local layers the logits equal those of transformers. *refused*: upstream does not",
        "build such a model. *–*: the family has no such layout.",
    ]
    families = list(dict.fromkeys(family for family, _, _ in wanted))
    for layers, title in (("local", "Local layers"), ("te", "Layers of Transformer Engine")):
        lines += ["", f"## {title}", "", f"| | {' | '.join(layouts)} |", "|---" * (len(layouts) + 1) + "|"]
        for family in families:
            keys = [(family, layout, layers) for layout in layouts]
            cells = [outcomes[key] if key in wanted else "–" for key in keys]
            lines.append(f"| {family} | {' | '.join(cells)} |")
    file.write_text("\n".join(lines) + "\n")
