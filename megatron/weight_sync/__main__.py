"""Command line: ``python -m megatron.weight_sync inspect|verify|materialise PATH``."""

from __future__ import annotations

import argparse
import sys

from megatron.weight_sync import archive
from megatron.weight_sync.errors import WeightSyncError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron.weight_sync", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="what is in a container file, or in a folder of payloads")
    verify = commands.add_parser(
        "verify", help="does the chain hold: digests, checksums, bases, fingerprints"
    )
    build = commands.add_parser("materialise", help="write the full weights of a version as safetensors")
    for command in (inspect, verify, build):
        command.add_argument(
            "path", help="folder of payloads, or URL that fsspec opens; inspect: also a file"
        )
    build.add_argument("--version", type=int, help="default: the newest")
    build.add_argument("--out", required=True, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        return {"inspect": _inspect, "verify": _verify, "materialise": _materialise}[args.command](args)
    except WeightSyncError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _inspect(args) -> int:
    print("\n".join(archive.describe(args.path)))
    return 0


def _verify(args) -> int:
    bad = seen = 0
    for entry, wrong in archive.verify(args.path):
        seen += 1
        bad += wrong is not None
        print(f"{entry.folder}: {wrong or 'good'}")
    print(f"{seen} payloads, {bad} bad" if seen else f"no payloads in {args.path}")
    return 0 if seen and not bad else 1


def _materialise(args) -> int:
    from safetensors.torch import save_file

    tensors, version = archive.materialise(args.path, args.version)
    save_file(tensors, args.out, metadata={"format": "pt", "version": str(version)})
    print(f"version {version}: {len(tensors)} tensors → {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
