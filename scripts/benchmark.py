"""Compare draft strategies on one target, one set of prompts and one verifier.

    python scripts/benchmark.py strategies=[ngram] target=tiny prompts.limit=4 max_new_tokens=32
    python scripts/benchmark.py -m drafter.ngram.k=4,8

Results go to the run folder: requests.jsonl, summary.json, summary.csv. Exit codes: 0 all rows succeeded; 1 refused, or
the run had to stop (a full disk, say); 3 some rows failed; 130 interrupted. What was computed is kept in every case.
"""

import sys

import hydra
from omegaconf import DictConfig

from specdec_lab.bench.command import benchmark_job
from specdec_lab.command import run_hydra
from specdec_lab.config import register_drafters

register_drafters()


@hydra.main(config_path="pkg://specdec_lab.conf", config_name="benchmark", version_base="1.3")
def main(config: DictConfig) -> float | None:
    """Run one benchmark, or one job of a sweep."""
    return benchmark_job(config)


if __name__ == "__main__":
    sys.exit(run_hydra(main))
