"""What the dashboard shows: sections of panels over the runs that ``specdec_lab.tracking`` writes.

Every metric is a key that a run's summary or history has; a test looks each of them up in a real offline run. Groups
and filters use the flat ``strategy``, since nested keys are written differently by different parts of W&B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STRATEGY = "strategy"
"""Key of a run's configuration by which strategies are told apart."""

SPEEDUP, LENGTH, RATE = "speedup.ratio_of_totals", "mean_acceptance_length", "decode_tokens_per_second"

BAR_SECTIONS: Mapping[str, Mapping[str, str]] = {
    "Speed": {
        SPEEDUP: "Speed-up over autoregressive, all tokens over all seconds",
        RATE: "Decode tokens per second",
        "speedup_end_to_end.ratio_of_totals": "Speed-up with the prefill",
        "time_per_output_token_ms.p95": "Milliseconds per token, 95th percentile over requests",
    },
    "Acceptance": {
        LENGTH: "Emitted tokens per round, bonus token included",
        "mean_accepted_drafts": "Accepted drafts per round",
        "acceptance_rate": "Accepted over proposed drafts",
    },
    "Cost": {
        "time_seconds.draft": "Seconds in the drafter",
        "time_seconds.verify": "Seconds in verify forwards",
        "time_seconds.accept": "Seconds of acceptance and sampling",
        "memory_bytes.draft_weights": "Bytes of the drafter's parameters",
    },
    "Same answers": {
        "exactness.identical": "Answers identical to the baseline's",
        "exactness.ties": "Answers that part at a tie within rounding",
        "exactness.different": "Answers that differ",
        "failed": "Requests that failed",
    },
}
"""Title of each section, and its bars: a summary metric of benchmark runs and what it says."""

TABLES = ("acceptance_by_depth", "by_category", "requests")
"""Tables that a benchmark run logs."""

TRAINING_LINES: Mapping[str, str] = {
    "train/loss": "Loss",
    "evaluation/loss": "Loss on validation texts",
    "evaluation/simulated_acceptance_length": "Acceptance length, chains of first choices on validation texts",
    "evaluation/real_acceptance_length": "Acceptance length, decoded",
    "train/learning_rate": "Learning rate",
}
"""Lines over optimizer steps of training runs."""

TRAINING_AXIS = "optimizer_step"

COLUMNS = (SPEEDUP, LENGTH, RATE, "acceptance_rate", "failed")
"""Summary metrics that the table of runs shows first."""


@dataclass(frozen=True)
class Where:
    """What the dashboard is about.

    Attributes:
        entity: user or team of the project.
        project: of the runs.
        groups: only runs of these; none means all.
        title: of the dashboard.
    """

    entity: str
    project: str
    groups: Sequence[str] = ()
    title: str = "Strategies compared"
