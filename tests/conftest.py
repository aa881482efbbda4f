"""Put the patched tree first on the path, here and in every process that a test starts."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build/tree"

sys.path.insert(0, str(TREE))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TREE), os.environ.get("PYTHONPATH")]))
