"""What the quickstart says at the end: a table, a picture and report.json."""

from __future__ import annotations

import json
import math
from pathlib import Path


def worst(a: float, b: float) -> float:
    """The larger one; NaN where either is, which max would pass over."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.2f} MB"


def table(summary: dict) -> str:
    """The summary as a person reads it, without what there was nothing to measure for (None)."""
    linear, packed = summary["tokens_linear"], summary["tokens_packed"]
    dense, delta = summary["dense_bytes"], summary["delta_bytes"]
    small = []
    if summary["bytes_per_sync_small_lr"] is not None:
        sent = f"{megabytes(summary['bytes_per_sync_small_lr'])}  ({summary['density_small_lr']:.2%} changed)"
        small = [(f"  per sync at lr {summary['small_lr']:.0e}", sent)]
    solved = []
    if summary["solved_before"] is not None:
        change = f"{summary['solved_before']:.3f} → {summary['solved_after']:.3f}"
        solved = [("solved exactly, held out", change)]
    rows = [
        ("device, ranks", f"{summary['device']}, {summary['world_size']}"),
        ("tree attention backend", f"{summary['tree_attention_backend']} (chosen by auto)"),
        ("steps, seconds", f"{summary['steps']}, {summary['seconds']:.0f}"),
        ("reward, first and last steps", f"{summary['reward_first']:.3f} → {summary['reward_last']:.3f}"),
        *solved,
        ("tokens, linear and packed", f"{linear:,} → {packed:,}  ({linear / packed:.2f}× fewer)"),
        ("tree against linear: |loss|", f"{summary['tree_vs_linear_loss_abs_diff']:.1e}"),
        ("tree against linear: gradients", f"{summary['tree_vs_linear_grad_rel_diff']:.1e} (relative)"),
        ("weights sent, if all dense", megabytes(dense)),
        ("weights sent", f"{megabytes(delta)}  ({dense / max(delta, 1):.2f}× less)"),
        ("  per sync, training", f"{megabytes(summary['bytes_per_sync_training'])}"),
        *small,
        (
            "syncs, fingerprints equal",
            f"{summary['syncs']}, {'all' if summary['fingerprints_equal'] else 'NOT ALL'}",
        ),
        ("largest logit difference to the rollout model", f"{summary['max_logit_diff']:.1e}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def write(folder: Path, summary: dict, steps: list[dict]) -> None:
    """report.json with the summary and every step, and report.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(summary | {"history": steps}, indent=1) + "\n")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    number = [step["step"] for step in steps]
    small = [step["step"] for step in steps if step["phase"] == "small"]
    figure, axes = plt.subplots(3, 1, figsize=(7, 8), sharex=True, layout="constrained")
    axes[0].plot(number, [step["reward"] for step in steps], color="tab:green")
    axes[0].set(
        ylabel="reward", ylim=(0, 1), title="A policy trained on trees, a rollout model fed by deltas"
    )
    axes[1].plot(number, [step["tokens_linear"] for step in steps], label="linear", color="tab:gray")
    axes[1].plot(number, [step["tokens_packed"] for step in steps], label="packed", color="tab:blue")
    axes[1].set(ylabel="tokens per step", ylim=(0, None))
    axes[2].plot(number, [step["dense_bytes"] for step in steps], label="dense", color="tab:gray")
    axes[2].plot(number, [step["sent_bytes"] for step in steps], label="sent", color="tab:red")
    axes[2].set(ylabel="bytes per sync", xlabel="step", yscale="log")
    for axis in axes:
        if small:
            axis.axvspan(small[0] - 0.5, number[-1] + 0.5, color="tab:orange", alpha=0.12, lw=0)
        if axis is not axes[0]:
            axis.legend()
    figure.savefig(folder / "report.png", dpi=120)
    plt.close(figure)
