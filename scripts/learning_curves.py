"""Put finished trainings of heads side by side: acceptance length over data, epochs and parameters.

    python scripts/learning_curves.py outputs/train_sweep/TIME/[0-9]* --out outputs/learning_curves

Writes learning_curves.csv and learning_curves.png. A curve joins trainings that differ in one of the three alone,
or in their seeds.
"""

import sys

from specdec_lab.distill.learning_curves import learning_curves_main

if __name__ == "__main__":
    sys.exit(learning_curves_main())
