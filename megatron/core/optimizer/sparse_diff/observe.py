"""Densities of the changes: JSON lines per sync and tensor, and a plot of them.

    python -m megatron.core.optimizer.sparse_diff.observe DIRECTORY [--out density.png]

Each rank writes `rank<R>.jsonl`, one line per tensor and sync, for the range of the tensor that it owns:

    {"sync": 3, "rank": 0, "name": "module.decoder.layers.5.mlp.linear_fc1.weight", "layer": 5,
     "elements": 4096, "changed": 17, "density": 0.00415}
"""

import argparse
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

__all__ = ["DIRECTORY_VARIABLE", "DensityLog", "densities", "plot"]

DIRECTORY_VARIABLE = "SPARSE_STATS_SAVED_DIR"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class DensityLog:
    """Appends this rank's lines; the file is created by the first."""

    def __init__(self, directory: str | os.PathLike | None, rank: int) -> None:
        folder = directory or os.environ.get(DIRECTORY_VARIABLE) or "sparse_diff_density"
        self.path = Path(folder) / f"rank{rank}.jsonl"
        self.rank = rank
        self.sync = 0

    def write(self, rows: Iterable[tuple[str, int, int]]) -> None:
        """Rows of one sync: name, elements that this rank owns, elements of them that changed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            for name, elements, changed in rows:
                layer = _LAYER.search(name)
                line = {
                    "sync": self.sync,
                    "rank": self.rank,
                    "name": name,
                    "layer": None if layer is None else int(layer[1]),
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

    sums = _sums(directory, "layer")
    layers = sorted({layer for row in sums.values() for layer in row if layer is not None})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for label, inside in (("in layers", True), ("outside layers", False)):
        points = []
        for sync, row in sums.items():
            cells = [cell for layer, cell in row.items() if (layer is not None) == inside]
            if cells:
                points.append((sync, sum(c for c, _ in cells) / sum(e for _, e in cells)))
        if points:
            left.plot(*zip(*points, strict=True), marker=".", label=label)
    left.set(xlabel="sync", ylabel="share of elements that changed")
    left.set_yscale("symlog", linthresh=1e-4)
    left.set_ylim(0, 1.1)
    left.legend()
    if layers:
        table = densities(directory)
        grid = [[row.get(layer, float("nan")) for row in table.values()] for layer in layers]
        image = right.imshow(grid, aspect="auto", origin="lower", interpolation="nearest")
        right.set(xlabel="sync", ylabel="layer")
        right.set_xticks(range(len(table)), list(table))
        right.set_yticks(range(len(layers)), layers)
        figure.colorbar(image, ax=right, label="share changed")
    else:
        right.set_axis_off()
    figure.savefig(out, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plot the densities that a run wrote.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, default=Path("density.png"))
    options = parser.parse_args()
    plot(options.directory, options.out)
    print("wrote", options.out)


if __name__ == "__main__":
    main()
