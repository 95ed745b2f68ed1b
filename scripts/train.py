"""Train a draft head from the target's own responses.

    python scripts/train.py head=medusa data.prompts=[prompts.jsonl] data.responses=[responses.safetensors]
    accelerate launch --config_file conf/accelerate/cpu2.yaml scripts/train.py head=eagle3 data...

The run folder gets metrics.jsonl, checkpoints/, training_curve.csv and .png, and the finished head in head/. Exit
codes: 0 trained; 1 refused, or the training had to stop; 130 interrupted, and resume=true goes on. The launcher has
codes of its own.
"""

import sys

import hydra
from omegaconf import DictConfig

from specdec_lab.command import run_hydra
from specdec_lab.distill.train_command import train_job


@hydra.main(config_path="pkg://specdec_lab.conf", config_name="train", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train one head, or one of a sweep."""
    train_job(config)


if __name__ == "__main__":
    sys.exit(run_hydra(main))
