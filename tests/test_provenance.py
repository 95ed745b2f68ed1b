"""Versions, commit and machine in every summary."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import transformers

from specdec_lab.provenance import git_sha, machine, package_versions


def test_versions_are_those_that_run() -> None:
    """Guards BM-07: a file says which versions its figures come from."""
    versions = package_versions()
    assert versions["transformers"] == transformers.__version__
    assert versions["torch"] == torch.__version__
    assert versions["python"]


def test_machine_counts_the_threads_in_use() -> None:
    """Guards BM-07: the thread count is the one in force, not that of the machine."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        found = machine()
    finally:
        torch.set_num_threads(before)
    assert found["threads"] == before + 1
    assert found["cpu"]
    assert (found["gpu"] is None) == (not torch.cuda.is_available())


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_is_that_of_the_package_and_of_nothing_around_it(tmp_path: Path) -> None:
    """A package inside an environment inside somebody's repository does not take that repository's commit."""
    installed = tmp_path / ".venv" / "site-packages" / "package"
    checked_out = tmp_path / "package"
    installed.mkdir(parents=True)
    checked_out.mkdir()
    assert git_sha(checked_out) is None
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    head = subprocess.run(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert git_sha(checked_out) == head.stdout.strip()
    assert git_sha(installed) is None
