"""Let the target answer prompts, as training data for draft heads.

    python scripts/generate_responses.py prompts.paths=[prompts.jsonl] evaluation=[question.jsonl]
    python scripts/generate_responses.py prompts.paths=[prompts.jsonl] samples=[0,1,2] sampling.temperature=0.7
    python scripts/generate_responses.py prompts.self_written=1000 samples=[0]

The run folder gets responses.jsonl (a row per answer, written as it is finished), manifest.json and at the end
responses.safetensors. A run that was stopped, or is to get more samples, goes on with hydra.run.dir=FOLDER resume=true.
Exit codes: 0 all was answered; 1 refused, or the run had to stop (a full disk, say); 3 some answers failed; 130
interrupted. What was answered is kept in every case.
"""

import sys

import hydra
from omegaconf import DictConfig

from specdec_lab.command import run_hydra
from specdec_lab.distill.responses_command import responses_job


@hydra.main(config_path="pkg://specdec_lab.conf", config_name="generate_responses", version_base="1.3")
def main(config: DictConfig) -> None:
    """Generate responses."""
    responses_job(config)


if __name__ == "__main__":
    sys.exit(run_hydra(main))
