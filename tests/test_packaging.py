"""What is installed is what is in the tree, in the versions that are tested."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
DATA = {".yaml", ".json", ".jsonl"}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def pinned() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, version in pins}


def test_wheel_holds_configuration_data_and_schemas(tmp_path: Path):
    """An installed copy composes and validates like a checkout: no file of the package is left out."""
    pytest.importorskip("hatchling", reason="the build backend comes with the dev extra")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "specdec_lab"
    expected = {
        path for path in package.rglob("*") if path.suffix in {".py", *DATA} and "__pycache__" not in path.parts
    }
    assert {path.suffix for path in expected} >= DATA
    assert {path.relative_to(ROOT).as_posix() for path in expected} <= inside
    assert all(name.startswith(("specdec_lab/", "specdec_lab-")) for name in inside)


def test_no_extra_names_torch():
    """Whoever installs an extra keeps the build of torch that suits the machine."""
    for extra, requirements in project()["optional-dependencies"].items():
        names = {canonicalize_name(Requirement(requirement).name) for requirement in requirements}
        assert not names & {"torch", "torchvision", "torchaudio", "triton"}, extra


def test_constraints_pin_every_dependency_within_its_range():
    """The versions that the tests run with are versions that the project says it supports."""
    pins = pinned()
    extras = project()["optional-dependencies"]
    for text in [*project()["dependencies"], *extras["dev"], *extras["notebooks"]]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        assert name == project()["name"] or requirement.specifier.contains(pins[name]), text
    assert pins["torch"].local is None  # any build of it will do


def test_conf_at_the_top_is_the_packages_own():
    """``conf/`` is a way in for readers, not a second copy that could go stale."""
    assert (ROOT / "conf").is_symlink()
    assert (ROOT / "conf").resolve() == (ROOT / "specdec_lab" / "conf").resolve()
