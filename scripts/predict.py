"""Project a run's acceptance onto other hardware and models, or check the cost model on this machine.

    python scripts/predict.py run=outputs/demo
    python scripts/predict.py run=outputs/demo hardware=h200 target=llama3_70b draft=llama3_1b

The first measures the target's forwards here and compares predicted with measured speed-ups; the second loads nothing.
prediction.json, .csv and .svg are written to the run folder.
"""

import sys

import hydra
from omegaconf import DictConfig

from specdec_lab.command import run_hydra
from specdec_lab.predict.command import predict_job


@hydra.main(config_path="pkg://specdec_lab.conf.predict", config_name="predict", version_base="1.3")
def main(config: DictConfig) -> None:
    """Predict one run."""
    predict_job(config)


if __name__ == "__main__":
    sys.exit(run_hydra(main))
