"""The command line of the dashboard: build it as JSON, and publish it when asked to."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from specdec_lab.bench.console import result_console
from specdec_lab.bench.files import START_ANEW, storage, write_atomically
from specdec_lab.command import SUCCESS, concluded, parsed, say
from specdec_lab.dashboard.build import comparison_report, comparison_workspace, report_json, workspace_json
from specdec_lab.dashboard.panels import Where
from specdec_lab.errors import InputError, SpecdecError, described

WORKSPACE, REPORT = "workspace.json", "report.json"


class PublishError(SpecdecError):
    """The server did not take the dashboard."""


def dashboard_main(words: Sequence[str] | None = None) -> int:
    """Build the dashboard as the command line says and return the exit code.

    Args:
        words: of the command line without the program's name; ``None`` takes this process's.
    """
    out, err = result_console(), Console(stderr=True)
    options = parsed(_parser(), words)
    return options if isinstance(options, int) else concluded(lambda: _build(options, out), err)


def _build(options: argparse.Namespace, out: Console) -> int:
    where = Where(options.entity, options.project, tuple(options.group), options.title)
    if not where.entity:
        raise InputError("--entity", None, "name the user or team of the project, or set WANDB_ENTITY")
    if options.publish and not os.environ.get("WANDB_API_KEY"):
        raise InputError("WANDB_API_KEY", None, "publishing needs a key; set it, or leave out --publish")
    workspace, report = comparison_workspace(where), comparison_report(where)
    with storage(options.out, START_ANEW, "--out"):
        options.out.mkdir(parents=True, exist_ok=True)
        for name, document in {WORKSPACE: workspace_json(workspace), REPORT: report_json(report)}.items():
            write_atomically(options.out / name, json.dumps(document, indent=2) + "\n")
    say(out, f"built: {options.out / WORKSPACE} and {options.out / REPORT}")
    if options.publish:
        for url in _publish(workspace, report):
            say(out, f"published: {url}")
    return SUCCESS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="publish_dashboard.py", description="Build the comparison dashboard on W&B.", allow_abbrev=False
    )
    parser.add_argument("--project", default=os.environ.get("WANDB_PROJECT", "specdec-lab"), help="of the runs")
    parser.add_argument("--entity", default=os.environ.get("WANDB_ENTITY", ""), help="user or team of the project")
    parser.add_argument("--group", action="append", default=[], help="only runs of this group; can be given again")
    parser.add_argument("--title", default=Where.title, help="of workspace and report")
    parser.add_argument("--out", type=Path, default=Path("outputs/dashboard"), metavar="FOLDER", help="for the JSON")
    parser.add_argument("--publish", action="store_true", help="send it, once the runs are there; needs WANDB_API_KEY")
    return parser


def _publish(workspace: object, report: object) -> list[str]:
    """Save both on the server, the report as a draft, and return their addresses.

    Raises:
        PublishError: what the library said.
    """
    urls = []
    for made, options in ((workspace, {}), (report, {"draft": True})):
        try:
            made.save(**options)  # type: ignore[attr-defined]
        except Exception as error:  # the library raises errors of the network, the server and its own
            raise PublishError(f"W&B did not take it ({described(error)}); the JSON is kept") from error
        urls.append(str(made.url))  # type: ignore[attr-defined]
    return urls
