# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Compare strategies, and read the result
#
# A benchmark decodes the same prompts with every strategy, in turns, on one target and one verifier. This notebook
# runs one on the `tiny` target, which speaks noise in microseconds; for real figures replace `target=tiny` by
# nothing at all, or start `make demo`, which does the same on SmolLM2-135M.
#
# What the command line calls `scripts/benchmark.py strategies=[...]` is a configuration, composed by Hydra, checked
# before anything is loaded, and run.

# %%
import json
import tempfile
from pathlib import Path

from hydra import compose, initialize_config_module
from IPython.display import Markdown, display
from omegaconf import OmegaConf
from rich.console import Console

from specdec_lab.bench.benchmark import check_run, run_benchmark
from specdec_lab.bench.settings import plan_run
from specdec_lab.compare.comparison import compare
from specdec_lab.compare.files import write_comparison
from specdec_lab.config import register_drafters

folder = Path(tempfile.mkdtemp()) / "run"
register_drafters()
with initialize_config_module("specdec_lab.conf", version_base="1.3"):
    overrides = ["target=tiny", "strategies=[ngram,lookahead]", "prompts.limit=6", "max_new_tokens=48"]
    plan = plan_run(OmegaConf.to_container(compose("benchmark", overrides=overrides), resolve=True))
check_run(plan, folder)
folder.mkdir()
summary = run_benchmark(plan, folder, Console(quiet=True), Console(quiet=True))
print(sorted(path.name for path in folder.iterdir()))

# %% [markdown]
# ## The numbers of a strategy
#
# `summary.json` has one entry per strategy, with the baseline `autoregressive` always among them.
#
# * **Mean acceptance length** (tau): tokens emitted per verify round, *with* the target's own bonus token. Plain
#   decoding has 1.00. `mean_accepted_drafts` is the other common definition, without the bonus: always one less.
# * **Speed-up**: the ratio of decode rates over the same requests, with a bootstrap interval over prompts.
# * More accepted tokens are not more speed: a round also has to be paid for.

# %%
lines = ["| strategy | tau | accepted drafts | speed-up | interval |", "|---|---|---|---|---|"]
for entry in summary["strategies"]:
    speedup = entry["speedup"]
    interval = "-" if speedup["ci95"] is None else "{:.2f} to {:.2f}".format(*speedup["ci95"])
    lines.append(
        f"| {entry['name']} | {entry['mean_acceptance_length']:.2f} | {entry['mean_accepted_drafts']:.2f} "
        f"| {speedup['ratio_of_totals']:.2f} | {interval} |"
    )
    assert entry["mean_acceptance_length"] - entry["mean_accepted_drafts"] < 1 + 1e-9
display(Markdown("\n".join(lines)))

# %% [markdown]
# ## Which one is faster?
#
# A comparison looks at every pair, prompt by prompt, and says *faster*, *slower* or *cannot tell*: a permutation
# test, corrected for the number of pairs. With six prompts it often cannot tell, and says so.

# %%
comparison = compare([folder])
for pair in comparison.pairs:
    print(f"{pair['first']} is {pair['verdict']} than {pair['second']} (p = {pair['p_corrected']})")
assert {pair["verdict"] for pair in comparison.pairs} <= {"faster", "slower", "cannot tell"}
print("every pair has a verdict")

# %% [markdown]
# ## Where does the time go?
#
# The ledger splits a mean round into its parts. A strategy has to emit at least its *break-even* length, its round
# over the baseline's, to be as fast as plain decoding.

# %%
for entry in comparison.entries:
    parts = {name: f"{value:.2f}" for name, value in entry["ledger"]["round_parts_ms"].items()}
    print(entry["label"], parts, f"break-even {entry['ledger']['break_even_acceptance_length']:.2f}")

# %% [markdown]
# ## A page to keep
#
# The same comparison as one HTML file with charts, sortable tables and all numbers inside: open it in a browser,
# print it, send it. `scripts/compare.py RUN RUN ...` makes one of any number of runs, and names what they differ in.

# %%
write_comparison(folder, comparison)
inside = json.loads((folder / "comparison.json").read_text())
assert inside["entries"][1]["numbers"] == summary["strategies"][1]
print((folder / "report.html").stat().st_size > 10_000)
print("one file, the same numbers")
