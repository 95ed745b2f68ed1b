"""Record the target's texts of a run with its hidden states, so that drafters can be scored on them.

    python scripts/record.py run=outputs/demo hydra.run.dir=outputs/recording

The size is printed and checked before anything is written; an interrupted recording goes on where it was.
"""

import sys

import hydra
from omegaconf import DictConfig

from specdec_lab.command import run_hydra
from specdec_lab.config import register_drafters
from specdec_lab.replay.command import record_job

register_drafters()


@hydra.main(config_path="pkg://specdec_lab.conf", config_name="record", version_base="1.3")
def main(config: DictConfig) -> None:
    """Make one recording."""
    record_job(config)


if __name__ == "__main__":
    sys.exit(run_hydra(main))
