"""Files of a payload directory: a local folder, or anything fsspec opens. Writes are atomic in both."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


class LocalStore:
    """A folder. A file appears whole or not at all: temporary name, fsync, rename, fsync of the folder."""

    def __init__(self, root: str | Path):
        self.root = Path(root)  # made by the first put: who only looks makes nothing

    def put(self, path: str, data) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def get(self, path: str) -> np.ndarray:
        return np.fromfile(self.root / path, dtype=np.uint8)

    def list(self) -> dict[str, int]:
        """Relative path → size in bytes; unfinished files are left out."""
        out = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                if name.startswith("."):
                    continue
                path = Path(folder, name)
                try:
                    out[path.relative_to(self.root).as_posix()] = path.stat().st_size
                except FileNotFoundError:
                    continue  # collected meanwhile
        return out

    def delete(self, path: str) -> None:
        target = self.root / path
        target.unlink(missing_ok=True)
        for folder in target.parents:
            if folder == self.root:
                return
            try:
                folder.rmdir()
            except OSError:
                return


class FsspecStore:
    """Anything fsspec opens. Object stores make a file visible when its upload is complete."""

    def __init__(self, url: str):
        try:
            import fsspec
        except ImportError:
            raise RuntimeError(f"{url} needs the fsspec package: pip install fsspec") from None
        self.fs, self.root = fsspec.core.url_to_fs(url)
        self.root = self.root.rstrip("/")

    def put(self, path: str, data) -> None:
        target = f"{self.root}/{path}"
        self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.fs.pipe_file(target, bytes(data))

    def get(self, path: str) -> np.ndarray:
        return np.frombuffer(bytearray(self.fs.cat_file(f"{self.root}/{path}")), dtype=np.uint8)

    def list(self) -> dict[str, int]:
        self.fs.invalidate_cache()
        try:
            found = self.fs.find(self.root, detail=True)
        except FileNotFoundError:
            return {}
        at = len(self.root) + 1
        return {name[at:]: info["size"] for name, info in found.items() if info["type"] == "file"}

    def delete(self, path: str) -> None:
        try:
            self.fs.rm_file(f"{self.root}/{path}")
        except FileNotFoundError:
            pass


def open_store(where: str | Path):
    """A path is a local folder; a URL with a scheme goes through fsspec, ``file://`` excepted."""
    text = str(where)
    if text.startswith("file://"):
        return LocalStore(text[len("file://") :])
    return FsspecStore(text) if "://" in text else LocalStore(text)
