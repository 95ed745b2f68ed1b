"""Put trained heads of the default target into the package, where `head: shipped` finds them.

    python scripts/ship_head.py outputs/heads/eagle outputs/heads/medusa

Each argument is the run folder of a finished training; its config.yaml says which kind of head it is.
"""

import sys
from pathlib import Path

import yaml

from specdec_lab.config import locate
from specdec_lab.errors import InputError
from specdec_lab.heads.shipped import MODELS, ship


def main(runs: list[str]) -> int:
    """Ship the head of each run folder."""
    for run in runs:
        try:
            config = yaml.safe_load((Path(run) / "config.yaml").read_text(encoding="utf-8"))
            kind = locate(config["head"]["_target_"], "head").kind
            print(ship(Path(run), kind, MODELS[config["target"]["model"]]))
        except (OSError, KeyError, TypeError) as error:
            print(f"error: {run} is no run folder of a training for {', '.join(MODELS)} ({error!r})", file=sys.stderr)
            return 1
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
