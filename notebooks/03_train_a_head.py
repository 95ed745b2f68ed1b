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
# # Train a head, and see it pay
#
# A draft head is a small network on the target's hidden states that guesses what the target will say. The target
# is its teacher: it answers prompts, and the head learns the target's own law at every token of the answers.
#
# Here the `tiny` target teaches an EAGLE head in some seconds. Its weights are random, so there is nothing about
# language to learn, and the head learns twelve answers by heart; what can be seen is the whole way from answers to
# accepted drafts. For a real head, [docs/training.md](../docs/training.md) has the same in four commands.

# %%
import tempfile
from pathlib import Path

import torch
from matplotlib import pyplot as plt

from specdec_lab import generate
from specdec_lab.distill.batch import Example
from specdec_lab.distill.features import OnlineFeatures
from specdec_lab.distill.learners.recurrent import EagleLearner
from specdec_lab.distill.loop import TrainPlan, train
from specdec_lab.distill.measured import measure_on
from specdec_lab.distill.train_settings import TrainSettings
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.drafters.eagle import EagleDrafter
from specdec_lab.targets.tiny import load_tiny

torch.set_num_threads(1)
target = load_tiny(device="cpu")

# %% [markdown]
# ## The target answers
#
# Only what the target wrote is a label; the prompt is context.

# %%
subjects = ["cat", "dog", "sun", "sea", "hill", "road", "bread", "stone", "bird", "tree", "door", "lamp"]
examples, prompts = [], []
for number, subject in enumerate(subjects):
    answer = generate(target, AutoregressiveDrafter(target), f"tell me about the {subject}", max_new_tokens=24)
    prompt = tuple(answer.request.prompt_ids)
    marks = (False,) * len(prompt) + (True,) * len(answer.output_ids)
    examples.append(Example(f"{number}/0/0", (*prompt, *answer.output_ids), marks))
    prompts.append(prompt)
print(sum(example.labels for example in examples), "labels")

# %% [markdown]
# ## The head learns
#
# `steps=2` runs the head on its own outputs during training, as it will when it drafts. The loop is the one that
# every kind of head is trained by; it can be stopped at any moment and goes on to the same bit.

# %%
counts = torch.bincount(torch.tensor([token for one in examples for token in one.ids]), minlength=target.vocab_size)
learner = EagleLearner(target, counts, draft_vocab=None, steps=2)
folder = Path(tempfile.mkdtemp()) / "run"
settings = TrainSettings(
    epochs=160, batch_size=12, learning_rate=6e-3, warmup_steps=5, evaluate_every=40, save_every=1000, log_every=8
)
chains = {"width": 1, "branches": 1, "depth": 3, "min_probability": 0.0}
measure = measure_on(prompts, 24, chains)
before = measure(learner)["real_acceptance_length"]
result = train(
    TrainPlan(settings), learner, examples, examples, OnlineFeatures(target, learner.feature_layers), measure, folder
)

# %% [markdown]
# ## What it is worth
#
# At every evaluation the head drafts in the engine, as it is then. The simulated length counts chains of first
# choices on the texts; the real one is what the engine accepted.

# %%
evaluations = [row for row in result.rows if row["kind"] == "evaluation"]
figure, axes = plt.subplots(figsize=(5, 3))
for name in ("simulated_acceptance_length", "real_acceptance_length"):
    axes.plot([row["optimizer_step"] for row in evaluations], [row[name] for row in evaluations], label=name)
axes.set(xlabel="optimizer step", ylabel="tokens per round")
axes.legend()
plt.show()

after = evaluations[-1]["real_acceptance_length"]
print(f"tokens per round: {before:.2f} before training, {after:.2f} after")
assert after > before + 0.5
print("the head pays")

# %% [markdown]
# ## The head is a folder
#
# Weights in safetensors under their published names, and a configuration with everything that made it. The strategy
# loads it by that folder: `drafter.eagle.head=FOLDER` on the command line.

# %%
drafter = EagleDrafter(target, head=str(result.head), verify_ms={1: 1.0, 512: 1.0})
drafted = generate(target, drafter, "tell me about the cat", max_new_tokens=24)
plain = generate(target, AutoregressiveDrafter(target), "tell me about the cat", max_new_tokens=24)
assert drafted.output_ids == plain.output_ids
print(len(plain.rounds), "rounds without,", len(drafted.rounds), "with the head")
print("the text is the target's")
