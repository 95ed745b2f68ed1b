"""The command line of the generation of responses: from Hydra's configuration to an exit code."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from specdec_lab.bench.command import REFUSED, ROWS_FAILED, SUCCESS, plain_config, run_job, say, say_error
from specdec_lab.distill.responses import check_run, generate_responses, plan_generation
from specdec_lab.errors import SpecdecError, one_line


def responses_job(config: DictConfig) -> None:
    """Generate responses inside Hydra; paths are relative to the folder of the launch.

    Raises:
        SystemExit, JobFailedError, KeyboardInterrupt: see ``run_job``.
    """
    run_job(config, _run)


def _run(config: DictConfig, folder: Path) -> int:
    out, err = Console(), Console(stderr=True)
    try:
        plan = plan_generation(plain_config(config))
        check_run(plan, folder)
        manifest = generate_responses(plan, folder, err)
    except SpecdecError as error:
        say_error(err, str(error))
        return REFUSED
    except OSError as error:  # of a library, while it loads: the run's own files have their sentence already
        say_error(err, one_line(error))
        return REFUSED
    except KeyboardInterrupt:
        say(err, f"interrupted; what was answered is kept, go on with: hydra.run.dir='{folder}' resume=true")
        raise
    counts = manifest["counts"]
    say(
        out,
        f"{counts['rows']} responses of {counts['response_tokens']} tokens to {counts['prompts']} prompts, "
        f"{counts['finished']} finished; left out: {counts['turns_too_long']} turns that were too long, "
        f"{counts['leaks_dropped']} leaking prompts",
    )
    say(out, f"responses: {folder}")
    if counts["failed"]:
        say(err, f"{counts['failed']} answers failed ({manifest['failed'][0]}); resume=true tries them again")
        return ROWS_FAILED
    return SUCCESS
