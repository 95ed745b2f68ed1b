"""Let strategies draft at every position of recorded texts, and score them: no clock, no forward of the target.

    python scripts/replay.py recording=outputs/recording
    python scripts/replay.py recording=outputs/recording strategies=[ngram] drafter.ngram.k=4

replay.json, .csv and .svg are written to the run folder: acceptance by depth and by rank, calibration of confidences,
and where strategies disagree.
"""

import sys

import hydra
from omegaconf import DictConfig

from specdec_lab.command import run_hydra
from specdec_lab.config import register_drafters
from specdec_lab.replay.command import replay_job

register_drafters()


@hydra.main(config_path="pkg://specdec_lab.conf", config_name="replay", version_base="1.3")
def main(config: DictConfig) -> None:
    """Replay one recording."""
    replay_job(config)


if __name__ == "__main__":
    sys.exit(run_hydra(main))
