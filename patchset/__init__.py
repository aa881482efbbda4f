"""Being a patch set: the pinned release, the patch queue, the build backend. Imports nothing of megatron.

This file and __main__.py keep to syntax that old interpreters parse, so that those get the message below.
"""

import sys
from pathlib import Path

if sys.version_info < (3, 12):  # noqa: UP036
    raise SystemExit(
        f"megatron-core needs Python 3.12 or newer; this is {sys.version.split()[0]} ({sys.executable})"
    )

ROOT = Path(__file__).resolve().parent.parent


class PatchsetError(RuntimeError):
    """Something about the checkout, the queue or the build is wrong; the message says what to do."""
