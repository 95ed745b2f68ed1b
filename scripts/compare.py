"""Compare finished benchmark runs: tables, comparison.csv, comparison.json and one HTML report.

    python scripts/compare.py outputs/demo
    python scripts/compare.py sweep/0 sweep/1 --out outputs/sweep_compared
    python scripts/compare.py bf16_run fp32_run --allow dtype

Runs that differ in machine, target, dtype, prompts, versions or the way they decode are refused by name unless --allow
names the difference too. Exit codes: 0 compared; 1 refused, or the results cannot be written.
"""

import sys

from specdec_lab.compare.command import compare_main

if __name__ == "__main__":
    sys.exit(compare_main())
