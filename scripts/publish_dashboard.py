"""Build the comparison dashboard, a W&B workspace and a report, as JSON; send both with --publish.

    python scripts/publish_dashboard.py --entity my-team --project specdec-lab
    wandb sync outputs/*/wandb/offline-run-*
    WANDB_API_KEY=... python scripts/publish_dashboard.py --entity my-team --publish

Building needs neither a network nor a key. The runs have to be on the server before the dashboard shows anything.
"""

import sys

from specdec_lab.dashboard.command import dashboard_main

if __name__ == "__main__":
    sys.exit(dashboard_main())
