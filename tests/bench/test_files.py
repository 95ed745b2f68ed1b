"""The run folder: what may be overwritten, and what survives."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest
from rich.console import Console

from specdec_lab.bench.benchmark import log_to
from specdec_lab.bench.files import (
    WRITTEN_BY_A_RUN,
    StorageError,
    check_folder,
    clear_folder,
    storage,
    write_atomically,
)
from specdec_lab.errors import InputError


def test_an_empty_or_absent_folder_is_free(tmp_path: Path):
    """A run may start there, also with resume=true: a job that is started again and again needs no other command."""
    for folder in (tmp_path, tmp_path / "absent"):
        for flags in ({}, {"resume": True}, {"overwrite": True}):
            check_folder(folder, **{"resume": False, "overwrite": False, **flags})


def test_a_used_folder_needs_a_decision(tmp_path: Path):
    """Results are never mixed or lost without a word."""
    for name in ("requests.jsonl", "summary.json", "config.yaml"):
        (tmp_path / name).write_text("x")
    with pytest.raises(InputError, match=r"hydra.run.dir=.*resume=true, overwrite=true or give another"):
        check_folder(tmp_path, resume=False, overwrite=False)
    with pytest.raises(InputError, match="give one of the two"):
        check_folder(tmp_path, resume=True, overwrite=True)
    check_folder(tmp_path, resume=True, overwrite=False)
    check_folder(tmp_path, resume=False, overwrite=True)


def test_overwrite_touches_nothing_that_is_not_a_runs(tmp_path: Path):
    """A folder given by mistake (a home folder, say) loses nothing."""
    (tmp_path / "summary.json").write_text("x")
    with pytest.raises(InputError, match=r"overwrite=True: .*holds summary.json and no config.yaml of an earlier run"):
        check_folder(tmp_path, resume=False, overwrite=True)
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "config.yaml").write_text("x")
    with pytest.raises(InputError, match=r"overwrite=True: .*also holds thesis.tex"):
        check_folder(tmp_path, resume=False, overwrite=True)
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(InputError, match=r"resume=True: .*holds no config.yaml"):
        check_folder(tmp_path, resume=True, overwrite=False)
    clear_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_overwrite_removes_every_file_of_a_run_but_not_tracked_runs(tmp_path: Path):
    """What an interrupted replacement left goes too; the folders of tracking runs are runs of their own."""
    for name in WRITTEN_BY_A_RUN - {"wandb"}:
        (tmp_path / name).write_text("x")
    (tmp_path / "summary.json.tmp").write_text("x")
    (tmp_path / "wandb").mkdir()
    check_folder(tmp_path, resume=False, overwrite=True)
    clear_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["wandb"]


def test_a_replacement_is_complete_or_absent(tmp_path: Path):
    """A failure while writing leaves the old file and no other."""
    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"


def test_a_full_disk_is_one_sentence():
    """The message names the field, the reason and the remedy."""
    with (
        pytest.raises(StorageError, match=r"hydra.run.dir='/runs/1': .*No space left.*resume=true"),
        storage(Path("/runs/1")),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_tracebacks_go_to_the_log_file_only(tmp_path: Path):
    """The console shows one line; a log that cannot be written does not disturb the run."""
    handlers = list(logging.getLogger().handlers)
    console = Console(record=True, width=200, file=(tmp_path / "console").open("w"))
    with log_to(tmp_path / "benchmark.log", console):
        try:
            raise RuntimeError("of the model")
        except RuntimeError:
            logging.getLogger("somewhere").warning("ngram failed", exc_info=True)
    assert "RuntimeError: of the model" in (tmp_path / "benchmark.log").read_text()
    shown = console.export_text()
    assert "ngram failed" in shown
    assert "Traceback" not in shown
    with log_to(Path("/dev/full"), console):
        logging.getLogger("somewhere").warning("still going")
    assert logging.getLogger().handlers == handlers
