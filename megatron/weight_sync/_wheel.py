"""PEP 517 backend of the small wheel: setuptools, run in a copy that has the package where it is imported
from.

The copy has fixed modes and dates, so that two builds give the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
EPOCH = "1764460800"  # dates inside the wheel, unless SOURCE_DATE_EPOCH says otherwise
SKIP = shutil.ignore_patterns(
    "__pycache__", "*.pyc", "*.egg-info", "pyproject.toml", "_wheel.py", "build", "dist"
)


@contextlib.contextmanager
def _staged():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(HERE, root / "megatron/weight_sync", ignore=SKIP)
        text = (HERE / "pyproject.toml").read_text()
        (root / "pyproject.toml").write_text(
            text.replace(
                'build-backend = "_wheel"\nbackend-path = ["."]', 'build-backend = "setuptools.build_meta"'
            )
        )
        shutil.copy(HERE / "README.md", root / "README.md")
        licence = HERE.parent.parent / "LICENSE"
        if licence.is_file():
            shutil.copy(licence, root / "LICENSE")
        for path in root.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.environ.setdefault("SOURCE_DATE_EPOCH", EPOCH)
        before, path_before = os.getcwd(), list(sys.path)
        os.chdir(root)
        try:
            yield
        finally:
            os.chdir(before)
            sys.path[:] = path_before


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    target = os.path.abspath(wheel_directory)
    mask = os.umask(0o022)
    try:
        with _staged():
            from setuptools import build_meta

            return build_meta.build_wheel(target, config_settings)
    finally:
        os.umask(mask)


def build_sdist(sdist_directory, config_settings=None):
    raise RuntimeError("megatron-weight-sync is built from the repository: build a wheel")
