"""What every command line of the project shares: jobs inside Hydra, exit codes, and mistakes told in one sentence."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import get_original_cwd
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from specdec_lab.config import suggest
from specdec_lab.errors import InputError, SpecdecError, one_line

MULTIRUN_FLAGS = ("-m", "--multirun")
SUCCESS, REFUSED, ROWS_FAILED, INTERRUPTED = 0, 1, 3, 130


class JobFailedError(Exception):
    """One job of a sweep did not succeed; it has said why, and the others go on."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the job ended with exit code {code}")
        self.code = code


def run_job(config: DictConfig, run: Callable[[DictConfig, Path], int]) -> None:
    """Call ``run(config, run folder)`` in the folder of the launch, and end the job with the exit code it returns.

    A job that is refused leaves no empty run folder behind.

    Raises:
        SystemExit: with the exit code, if it is not 0.
        JobFailedError: the same within a sweep, which goes on.
        KeyboardInterrupt: the run was interrupted, which ends a sweep too.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    with chdir(get_original_cwd()):
        code = run(config, folder)
    if code == REFUSED:
        with suppress(OSError):  # Hydra made it before anything was checked; one that holds something stays
            folder.rmdir()
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code != SUCCESS:
        raise JobFailedError(code) if hydra.mode is RunMode.MULTIRUN else SystemExit(code)


def run_plain_job(config: DictConfig, run: Callable[[dict[str, Any], Path, Console], int]) -> None:
    """Call ``run(resolved configuration, run folder, console of errors)`` as a job; its refusals are one sentence.

    Raises:
        SystemExit, JobFailedError, KeyboardInterrupt: as ``run_job``.
    """
    err = Console(stderr=True)
    run_job(config, lambda config, folder: concluded(lambda: run(plain_config(config), folder, err), err))


def concluded(work: Callable[[], int], err: Console) -> int:
    """Return the exit code that a command's work returns, or say in one sentence why it was refused."""
    try:
        return work()
    except SpecdecError as error:
        say_error(err, str(error))
    except OSError as error:  # of a library, while it loads: our own files have their sentence already
        say_error(err, one_line(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    return REFUSED


def parsed(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace | int:
    """Return the options of a command line, or the exit code where argparse has said all there is to say."""
    try:
        return parser.parse_args(words)
    except SystemExit as end:  # argparse ends with 2
        return REFUSED if end.code else SUCCESS


def run_hydra(main: Callable[[], Any]) -> int:
    """Call a ``@hydra.main`` function and return the exit code; a user's mistake ends in one sentence.

    Hydra would print a traceback for some mistakes (a run folder that cannot be made) and its own exit code for
    others, so its exceptions are let through to here.
    """
    if not sys.stderr.isatty():
        disable_progress_bar()  # of transformers: a bar that is redrawn fills a log
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in MULTIRUN_FLAGS)  # Hydra takes no flag in between
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        main()
    except JobFailedError as failed:
        return failed.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        return REFUSED if end.code == 2 else int(end.code or SUCCESS)  # argparse ends with 2
    except (HydraException, OmegaConfBaseException) as error:
        if wants_traceback:
            raise
        say_error(Console(stderr=True), library_message(error))
        return REFUSED
    except OSError as error:  # Hydra makes the run folder before the job starts
        remedy = f"the run folder cannot be made ({error.strerror}); give another one"
        say_error(Console(stderr=True), str(InputError("hydra.run.dir", error.filename, remedy)))
        return REFUSED
    return SUCCESS


def say(console: Console, text: str) -> None:
    """Print text as it is, in one line."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def say_error(console: Console, sentence: str) -> None:
    """Print what a user has to mend."""
    console.print("error: ", style="bold red", end="")
    say(console, sentence)


def plain_config(config: DictConfig) -> dict:
    """Resolve the configuration into plain containers; parameters that are left open stay ``???``.

    Raises:
        InputError: a value that cannot be resolved.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise InputError(error.full_key or "config", None, library_message(error)) from error
    assert isinstance(plain, dict)
    return plain


def in_sweep(config: dict[str, Any]) -> dict[str, Any]:
    """Give the tracked runs of a sweep's jobs one group, the name of the sweep's folder, unless they have one."""
    tracking = config.get("tracking")
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    if not tracking or tracking.get("group") is not None or hydra is None or hydra.mode is not RunMode.MULTIRUN:
        return config
    return {**config, "tracking": {**tracking, "group": Path(hydra.sweep.dir).name}}


def go_on(folder: Path) -> str:
    """Return the options with which this job goes on where it was interrupted."""
    given = HydraConfig.get().overrides.task
    same = [word for word in given if word.partition("=")[0].lstrip("+") not in ("resume", "overwrite")]
    return shlex.join([*same, f"hydra.run.dir={folder}", "resume=true"])


def library_message(error: Exception) -> str:
    """Return all of a message of Hydra's or OmegaConf's in one line, without the parts that help nobody."""
    unknown = re.search(r"Could not override '([^']+)'", str(error))
    if unknown is not None:  # Hydra advises to add the field with a +, which every check here refuses
        cause = error.__cause__
        where, name = getattr(cause, "full_key", None) or unknown.group(1), str(getattr(cause, "key", unknown.group(1)))
        held = [str(key) for key in getattr(cause, "parent_node", None) or ()]
        known = [key for key in held if not key.startswith("_") and key != "hydra"]
        return f"{where}: there is no field of that name{suggest(name, known) if known else ''}"
    text = f"{error} {error.__cause__ or ''}".split("Config search path")[0]
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("object_type=", "full_key:")))
