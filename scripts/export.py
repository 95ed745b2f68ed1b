"""Write a finished run in another project's format.

    python scripts/export.py format=spec_bench run=outputs/demo hydra.run.dir=outputs/answers

spec_bench: one answer file per strategy, as that benchmark's scripts for speed and equality read them.
"""

import sys

import hydra
from omegaconf import DictConfig

from specdec_lab.command import run_hydra
from specdec_lab.export.command import export_job


@hydra.main(config_path="pkg://specdec_lab.conf", config_name="export", version_base="1.3")
def main(config: DictConfig) -> None:
    """Export one run."""
    export_job(config)


if __name__ == "__main__":
    sys.exit(run_hydra(main))
