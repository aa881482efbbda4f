"""Densities of the changes: JSON lines per sync and tensor, and a plot of them.

    python -m megatron.core.optimizer.sparse_diff.observe DIRECTORY [--out density.png]

Each rank writes `rank<R>.jsonl`, one line per tensor and sync, for the range of the tensor that it owns:

    {"sync": 3, "rank": 0, "name": "module.decoder.layers.5.mlp.linear_fc1.weight", "layer": 5,
     "elements": 4096, "changed": 17, "density": 0.00415}

Layers are counted over all pipeline stages, from 0, in names too; `layer` is null outside of them. A run that
finds its file there goes on counting after the last sync in it.
"""

import argparse
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

__all__ = ["DIRECTORY_VARIABLE", "DensityLog", "densities", "plot"]

DIRECTORY_VARIABLE = "SPARSE_STATS_SAVED_DIR"
_LAYER = re.compile(r"((?:^|\.)layers\.)\d+(?=\.)")


class DensityLog:
    """Appends this rank's lines; the file is created by the first."""

    def __init__(self, directory: str | os.PathLike | None, rank: int) -> None:
        folder = directory or os.environ.get(DIRECTORY_VARIABLE) or "sparse_diff_density"
        self.path = Path(folder) / f"rank{rank}.jsonl"
        self.rank = rank
        text = self.path.read_text() if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # a run was stopped while it wrote
            self.path.write_text(whole)
        self.sync = json.loads(whole.splitlines()[-1])["sync"] + 1 if whole else 0

    def write(self, rows: Iterable[tuple[str, int | None, int, int]]) -> None:
        """Rows of one sync: name, layer, elements that this rank owns, elements of them that changed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            for name, layer, elements, changed in rows:
                line = {
                    "sync": self.sync,
                    "rank": self.rank,
                    "name": name if layer is None else _LAYER.sub(rf"\g<1>{layer}", name, count=1),
                    "layer": layer,
                    "elements": elements,
                    "changed": changed,
                    "density": changed / elements,
                }
                file.write(json.dumps(line) + "\n")
        self.sync += 1


def _sums(directory: str | os.PathLike, by: str) -> dict[int, dict]:
    """`{sync: {key: (changed, elements)}}` over all ranks' files."""
    files = sorted(Path(directory).glob("rank*.jsonl"))
    if not files:
        raise FileNotFoundError(
            f"no rank*.jsonl in {directory}; run with mode 'observe' or 'update_and_observe'"
        )
    sums: dict[int, dict] = defaultdict(lambda: defaultdict(lambda: (0, 0)))
    for path in files:
        for text in path.read_text().splitlines():
            line = json.loads(text)
            changed, elements = sums[line["sync"]][line[by]]
            sums[line["sync"]][line[by]] = changed + line["changed"], elements + line["elements"]
    return {sync: dict(row) for sync, row in sorted(sums.items())}


def densities(directory: str | os.PathLike, by: str = "layer") -> dict[int, dict]:
    """Share of elements that changed, over all ranks' files: `{sync: {layer or name: density}}`.

    Raises:
        FileNotFoundError: where the directory has no `rank*.jsonl`.
    """
    return {
        sync: {key: changed / elements for key, (changed, elements) in row.items()}
        for sync, row in _sums(directory, by).items()
    }


def plot(directory: str | os.PathLike, out: str | os.PathLike) -> None:
    """Density over syncs, and over syncs and layers, as one PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    sums = _sums(directory, "layer")
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    everything = {"in layers": [], "outside layers": []}
    for sync, row in sums.items():
        for label, inside in (("in layers", True), ("outside layers", False)):
            cells = [cell for layer, cell in row.items() if (layer is not None) == inside]
            if cells:
                everything[label].append((sync, sum(c for c, _ in cells) / sum(e for _, e in cells)))
    for label, points in everything.items():
        if points:
            left.plot(*zip(*points, strict=True), marker="." if len(points) < 100 else "", label=label)
    positive = [density for points in everything.values() for _, density in points if density]
    # linear below the least that was found, so that zero has a place
    left.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(min(positive, default=1e-4))))
    left.set_ylim(0, min(1.05, 2 * max(positive, default=0.5)))
    left.set(title="Elements that changed since the last sync", xlabel="sync", ylabel="share of elements")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.grid(alpha=0.3)
    left.legend()
    _layers(figure, right, densities(directory))
    figure.savefig(out, dpi=120)
    plt.close(figure)


def _layers(figure, axes, table: dict[int, dict]) -> None:
    """The densities of the layers over syncs; grey where nothing changed, white where nothing was written."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    found = [layer for row in table.values() for layer in row if layer is not None]
    if not found:
        axes.set_axis_off()
        return
    syncs, layers = range(min(table), max(table) + 1), range(min(found), max(found) + 1)
    grid = [[table.get(sync, {}).get(layer, math.nan) for sync in syncs] for layer in layers]
    positive = [density for row in grid for density in row if density > 0]
    low, high = min(positive, default=1e-4), max(positive, default=1.0)
    edges = [syncs[0] - 0.5, syncs[-1] + 0.5, layers[0] - 0.5, layers[-1] + 0.5]
    shown = dict(aspect="auto", origin="lower", interpolation="nearest", extent=edges)
    zero = [[0.8 if density == 0 else math.nan for density in row] for row in grid]
    axes.imshow(zero, cmap="gray", vmin=0, vmax=1, **shown)
    changed = [[density if density > 0 else math.nan for density in row] for row in grid]
    image = axes.imshow(changed, norm=LogNorm(low, max(high, 1.1 * low)), **shown)
    axes.set(title="The same, by layer", xlabel="sync", ylabel="layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, label="share of elements (grey: none)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Plot the densities that a run wrote.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, default=Path("density.png"))
    options = parser.parse_args()
    plot(options.directory, options.out)
    print("wrote", options.out)


if __name__ == "__main__":
    main()
