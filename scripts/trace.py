"""Show who produced each token of one answer, and the draft tree of one round.

    python scripts/trace.py question_id=1 max_new_tokens=96
    python scripts/trace.py target=tiny strategy=ngram drafter.ngram.branches=3 round=4 html=trace.html
    python scripts/trace.py 'prompt="Count to ten, then count to ten again."'

A prompt with commas or colons needs both pairs of quotes: the outer ones are the shell's, the inner ones Hydra's.
Exit codes: 0 shown, 1 refused.
"""

import sys

import hydra
from omegaconf import DictConfig

from specdec_lab.bench.trace_command import trace_job
from specdec_lab.command import run_hydra
from specdec_lab.config import register_drafters

register_drafters()


@hydra.main(config_path="pkg://specdec_lab.conf", config_name="trace", version_base="1.3")
def main(config: DictConfig) -> None:
    """Trace one answer."""
    trace_job(config)


if __name__ == "__main__":
    sys.exit(run_hydra(main))
