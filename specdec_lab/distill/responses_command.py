"""The command line of the generation of responses: from Hydra's configuration to an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from specdec_lab.command import ROWS_FAILED, SUCCESS, go_on, run_plain_job, say
from specdec_lab.distill.responses import check_run, generate_responses, plan_generation
from specdec_lab.errors import InputError


def responses_job(config: DictConfig) -> None:
    """Generate responses inside Hydra; paths are relative to the folder of the launch.

    Raises:
        SystemExit, JobFailedError, KeyboardInterrupt: see ``run_job``.
    """
    run_plain_job(config, _run)


def _run(config: dict[str, Any], folder: Path, err: Console) -> int:
    out = Console()
    try:
        plan = plan_generation(config)
        check_run(plan, folder)
        manifest = generate_responses(plan, folder, err)
    except KeyboardInterrupt:
        say(err, f"interrupted; what was answered is kept, go on with: {go_on(folder)}")
        raise
    counts = manifest["counts"]
    say(
        out,
        f"{counts['rows']} responses of {counts['response_tokens']} tokens to {counts['prompts']} prompts, "
        f"{counts['finished']} finished; left out: {counts['turns_too_long']} turns that were too long, "
        f"{counts['leaks_dropped']} leaking prompts",
    )
    if counts["turns_too_long"] and not counts["rows"]:
        too_long = f"all {counts['turns_too_long']} turns have longer prompts, so there is nothing to answer; give more"
        raise InputError("max_prompt_tokens", plan.settings.max_prompt_tokens, too_long)
    say(out, f"responses: {folder}")
    if counts["failed"]:
        say(err, f"{counts['failed']} answers failed ({manifest['failed'][0]}); resume=true tries them again")
        return ROWS_FAILED
    return SUCCESS
