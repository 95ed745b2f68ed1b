"""Measure what docs/performance.md and docs/decisions/ quote, on this machine.

    python scripts/measure.py
    python scripts/measure.py parts=[generate,lookup] prompts.limit=12 alternations=3

Each part prints a table and writes PART.json to the run folder. Nothing else should run on the machine meanwhile.
"""

import sys

import hydra
from omegaconf import DictConfig

from specdec_lab.command import run_hydra
from specdec_lab.measure.command import measure_job


@hydra.main(config_path="pkg://specdec_lab.conf", config_name="measure", version_base="1.3")
def main(config: DictConfig) -> None:
    """Run the chosen parts."""
    measure_job(config)


if __name__ == "__main__":
    sys.exit(run_hydra(main))
