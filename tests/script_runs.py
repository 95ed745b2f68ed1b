"""The scripts as their users run them: in processes of their own, in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_script(
    folder: Path, script: str, *words: str, path: Path | None = None, seconds: int = 300
) -> subprocess.CompletedProcess[str]:
    """Run a script of ``scripts/`` and return how it ended, with what it printed.

    Args:
        folder: that it is launched from.
        script: its file's name.
        words: of its command line.
        path: a folder whose modules it finds before any other.
        seconds: after which it counts as hanging.
    """
    found = [str(place) for place in (path, ROOT) if place is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(found), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, str(ROOT / "scripts" / script), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
