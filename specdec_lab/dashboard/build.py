"""The workspace and the report as W&B's own library makes them, as JSON, without a network and without a key.

``wandb-workspaces`` gives access to the JSON by ``_to_model`` alone, which is why its minor version is pinned.
"""

from __future__ import annotations

import json
from typing import Any

from specdec_lab.dashboard.panels import (
    BAR_SECTIONS,
    COLUMNS,
    LENGTH,
    RATE,
    SPEEDUP,
    STRATEGY,
    TABLES,
    TRAINING_AXIS,
    TRAINING_LINES,
    Where,
)
from specdec_lab.distill.train_tracking import JOB_TYPE as TRAIN_JOB_TYPE
from specdec_lab.optional import library
from specdec_lab.tracking import JOB_TYPE


def _workspaces() -> Any:
    return library("wandb_workspaces.workspaces", "dashboards")


def _reports() -> Any:
    return library("wandb_workspaces.reports.v2", "dashboards")


def comparison_workspace(where: Where) -> Any:
    """Return the project's workspace: a section per question, and one for trainings."""
    workspaces, reports = _workspaces(), _reports()
    sections = [
        workspaces.Section(name=title, panels=_bars(reports, bars), is_open=title in ("Speed", "Acceptance"))
        for title, bars in BAR_SECTIONS.items()
    ]
    sections.insert(1, workspaces.Section(name="Speed against acceptance", panels=[_scatter(reports)], is_open=True))
    sections.append(workspaces.Section(name="Tables", panels=_tables(reports)))
    sections.append(workspaces.Section(name="Training", panels=_training(reports)))
    return workspaces.Workspace(
        entity=where.entity,
        project=where.project,
        name=where.title,
        sections=sections,
        runset_settings=workspaces.RunsetSettings(
            filters=filters(where, trainings=True),
            groupby=[workspaces.Config(STRATEGY)],
            order=[workspaces.Ordering(workspaces.Summary(SPEEDUP), ascending=False)],
        ),
    )


def comparison_report(where: Where) -> Any:
    """Return a report that reads from top to bottom: how to read it, speed, acceptance, where the time goes."""
    reports = _reports()
    blocks: list[Any] = [
        reports.TableOfContents(),
        reports.H1("How to read this"),
        reports.MarkdownBlock(
            "One run per strategy and benchmark. A speed-up is over `autoregressive` in the same process, on the same "
            "prompts, taken in turns. `mean_acceptance_length` counts the bonus token, so plain decoding has 1.00. "
            "Whether two strategies differ at all is said by `comparison.json` and `report.html` in the run folder, "
            "which hold the intervals: bars here have none."
        ),
    ]
    for title, bars in BAR_SECTIONS.items():
        panels = _bars(reports, bars) + ([_scatter(reports)] if title == "Speed" else [])
        blocks += [reports.H1(title), reports.PanelGrid(runsets=[_runset(reports, where)], panels=panels)]
    blocks += [
        reports.H1("Tables"),
        reports.PanelGrid(runsets=[_runset(reports, where)], panels=_tables(reports)),
        reports.H1("Training"),
        reports.PanelGrid(runsets=[reports.Runset(name="trainings")], panels=_training(reports)),
    ]
    return reports.Report(
        entity=where.entity,
        project=where.project,
        title=where.title,
        description="Draft strategies on one verifier, measured by specdec_lab",
        blocks=blocks,
    )


def workspace_json(workspace: Any) -> dict[str, Any]:
    """Return what would be sent for a workspace."""
    return json.loads(workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))


def report_json(report: Any) -> dict[str, Any]:
    """Return what would be sent for a report."""
    return json.loads(report._to_model().model_dump_json(by_alias=True, exclude_none=True))


def filters(where: Where, *, trainings: bool = False) -> Any:
    """Return the filter that keeps benchmark runs, of the wanted groups if any are named.

    Args:
        trainings: whether runs of trainings are kept too.
    """
    expr = library("wandb_workspaces.expr", "dashboards")
    kept: list[Any] = [expr.Metric("JobType").isin([JOB_TYPE, TRAIN_JOB_TYPE] if trainings else [JOB_TYPE])]
    if where.groups:
        kept.append(expr.Metric("Group").isin(list(where.groups)))
    return expr.And(*kept)


def _runset(reports: Any, where: Where) -> Any:
    # with entity and project the library would ask a server for the project's id; without, the report's own is meant
    return reports.Runset(
        name="strategies", filters=filters(where), groupby=[f"config.{STRATEGY}"], pinned_columns=_columns()
    )


def _columns() -> list[str]:
    return ["run:displayName", *(f"summary:{name}" for name in COLUMNS)]


def _bars(reports: Any, bars: Any) -> list[Any]:
    return [
        reports.BarPlot(title=title, metrics=[reports.SummaryMetric(metric)], groupby=reports.Config(STRATEGY))
        for metric, title in bars.items()
    ]


def _scatter(reports: Any) -> Any:
    return reports.ScatterPlot(
        title="Decode rate against acceptance length",
        x=reports.SummaryMetric(LENGTH),
        y=reports.SummaryMetric(RATE),
    )


def _tables(reports: Any) -> list[Any]:
    return [reports.WeavePanelSummaryTable(table_name=name) for name in TABLES]


def _training(reports: Any) -> list[Any]:
    return [
        reports.LinePlot(title=title, x=TRAINING_AXIS, y=[metric], groupby=reports.Config(STRATEGY))
        for metric, title in TRAINING_LINES.items()
    ]
