"""A checkout in small: for what can be tested without the real upstream and without pip."""

import hashlib
import io
import os
import tarfile
from pathlib import Path

from patchset import replay, tree

GIT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_{key}": "a@b.invalid" for who in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")},
}

UPSTREAM = {
    "pyproject.toml": "[project]\nname = 'mini'\n",
    "README.md": "mini\n",
    "megatron/core/__init__.py": "",
    "megatron/core/numbers.py": "".join(f"line_{n} = {n}\n" for n in range(1, 41)),
    "megatron/core/twins.py": "class A:\n    x: int\n\n\nclass B:\n    x: int\n\n\nclass C:\n    x: int\n",
    "megatron/core/part/deep.py": "deep = 1\nend = 2\n",
}


class Miniature:
    """An upstream of a few files, a queue, modules of ours; patchset's functions are called on its root."""

    def __init__(self, root: Path, monkeypatch) -> None:
        self.root, self.tree, self.monkeypatch = root, root / "build/tree", monkeypatch
        (root / "patches").mkdir(parents=True)
        (root / "megatron/core").mkdir(parents=True)
        (root / "patches/series").write_text("")
        (root / "LICENSE").write_text("licence\n")
        (root / "NOTICE").write_text("notice\n")
        (root / "megatron/core/LOCAL_VERSION").write_text("ours.1\n")
        self.sdist = self.release("0.1.0", UPSTREAM)
        self.pin("0.1.0", self.sdist)

    def release(self, version: str, files: dict[str, str]) -> Path:
        """The sdist of an upstream release."""
        path = self.root / f"dist/megatron_core-{version}.tar.gz"
        path.parent.mkdir(exist_ok=True)
        with tarfile.open(path, "w:gz") as tar:
            for name, text in files.items():
                member = tarfile.TarInfo(f"megatron_core-{version}/{name}")
                member.size, member.mtime = len(text.encode()), 1_700_000_000
                tar.addfile(member, io.BytesIO(text.encode()))
        self.monkeypatch.setenv("MEGATRON_CORE_SDIST", str(path))
        return path

    def pin(self, version: str, path: Path) -> None:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        (self.root / "patches/upstream.txt").write_text(f"megatron-core=={version} --hash=sha256:{digest}\n")

    def write(self, name: str, text: str) -> Path:
        place = self.root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        return place

    def edit(self, name: str, old: str, new: str) -> None:
        """Edit a file of build/tree."""
        text = (self.tree / name).read_text()
        assert text.count(old) == 1, (name, old)
        (self.tree / name).write_text(text.replace(old, new))

    def patch(self, subject: str, name: str, old: str, new: str) -> Path:
        """A new patch at the end of the queue, with a complete header."""
        tree.materialise(self.root)
        self.edit(name, old, new)
        (path,) = replay.export(self.root, subject=subject)
        text = path.read_text().replace(
            "TODO: why the", "For this reason, which is long enough to count, the"
        )
        path.write_text(text.replace("Removal: TODO", "Removal: when upstream does it"))
        replay.export(self.root)
        return path
