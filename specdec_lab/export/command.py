"""The command line of an export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from specdec_lab.bench.console import result_console
from specdec_lab.bench.files import START_ANEW, storage, write_atomically
from specdec_lab.command import SUCCESS, run_plain_job, say
from specdec_lab.compare.runs import read_named_run
from specdec_lab.config import demand, validate
from specdec_lab.export.spec_bench import answer_lines, incomplete_questions


class ExportSettings(BaseModel):
    """Values of ``conf/export.yaml``; the file explains each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Annotated[str, Field(min_length=1)]
    format: Literal["spec_bench"] = "spec_bench"


def export_job(config: DictConfig) -> None:
    """Export one run inside Hydra; see ``specdec_lab.command.run_job``."""
    run_plain_job(config, _run)


def _run(config: dict[str, Any], folder: Path, err: Console) -> int:
    out = result_console()
    demand(config, "run", "give the folder of a finished benchmark, as run=outputs/demo")
    settings = validate(ExportSettings, config)
    run = read_named_run(settings.run)
    for entry in run.summary["strategies"]:
        lines = answer_lines(run.rows, entry["name"])
        path = folder / f"{entry['name']}.jsonl"
        with storage(folder, START_ANEW):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, "".join(f"{line}\n" for line in lines))
        say(out, f"{path}: {len(lines)} questions")
    left_out = incomplete_questions(run.rows)
    if left_out:
        say(err, f"{len(left_out)} questions of which a strategy failed a turn are left out of all files")
    return SUCCESS
