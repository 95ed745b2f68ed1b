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
# # Speculative decoding in a few cells
#
# A language model writes one token per forward pass, and on most machines the pass takes the time of reading
# all weights once, however few tokens it looks at. Speculative decoding uses that: a cheap **draft** guesses
# the next tokens, and the **target** checks all guesses in one pass. Guesses that the target would have chosen
# itself are **accepted**; at the first one that is wrong, the target's own token takes its place. So the text
# stays the target's, token for token, and a pass can yield several tokens.
#
# This notebook runs on the `tiny` target: two random layers, tokenizer and chat template, built in code in a
# moment. Its text is noise, but every mechanism is the real one. For a model that speaks, replace the next
# cell's target by `specdec_lab.targets.smollm2.load_smollm2_135m()`.

# %%
from specdec_lab import DraftTree, SamplingParams, generate
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.drafters.ngram import NgramDrafter
from specdec_lab.targets.tiny import load_tiny

target = load_tiny(device="cpu")
prompt = "the cat and the dog and the cat"

# %% [markdown]
# ## The same prompt, twice
#
# `autoregressive` is plain decoding: it guesses nothing. `ngram` is prompt lookup: it finds where the last few
# tokens occurred before and guesses that what followed then will follow again. Both go through the same loop,
# so a **round** is one forward pass of the target for both. (The prompt's own pass yields the first token and
# is no round.)

# %%
plain = generate(target, AutoregressiveDrafter(target), prompt, max_new_tokens=96)
drafter = NgramDrafter(target, k=4, branches=2, max_nodes=12)
drafted = generate(target, drafter, prompt, max_new_tokens=96)

for name, generation in {"autoregressive": plain, "ngram": drafted}.items():
    rounds = len(generation.rounds)
    emitted = sum(one.accepted + one.bonus for one in generation.rounds)
    print(f"{name:15} {emitted} tokens in {rounds} rounds: {emitted / rounds:.2f} tokens per round")

assert drafted.text == plain.text
assert drafted.output_ids == plain.output_ids
assert len(drafted.rounds) < len(plain.rounds)
print("identical texts")

# %% [markdown]
# ## One draft tree
#
# A draft is a **tree**: the root is the last token of the text, and every path down from it is a guess at what
# comes next. All nodes go through the target together; a mask lets each node see the text and its own ancestors
# only. The target then walks down from the root: as long as the token it would choose is among the children, it
# steps there. Where it is not, the walk ends, and that token is added to the text as the **bonus**.

# %%
number, shown = max(
    enumerate(drafted.rounds),
    key=lambda entry: (entry[1].proposed_nodes > entry[1].proposed, entry[1].accepted),  # forked, then well accepted
)
tree = DraftTree(shown.tokens, shown.parents)
start = 1 + sum(one.accepted + one.bonus for one in drafted.rounds[:number])  # tokens of the answer before this round

print(f"round {number + 1}: {shown.proposed_nodes} draft tokens, {shown.accepted} accepted")
for node, token in enumerate(tree.tokens):
    verdict = "root" if node == 0 else "accepted" if node in shown.path else "rejected"
    print(f"{'    ' * tree.depths[node]}{target.tokenizer.decode([token])!r:10} {verdict}")

accepted = [tree.tokens[node] for node in shown.path]
bonus = drafted.output_ids[start + shown.accepted]
assert drafted.output_ids[start : start + shown.accepted] == tuple(accepted)
print(f"bonus: {target.tokenizer.decode([bonus])!r}, so the round wrote {shown.accepted + shown.bonus} tokens")

# %% [markdown]
# ## Sampling is no exception
#
# With a temperature the target's choices are random, but the noise depends on the seed and the position, not on
# who drafts. So one seed gives one text under every strategy.

# %%
sampling = SamplingParams(temperature=0.7, seed=1)
sampled = [
    generate(target, one, prompt, max_new_tokens=48, sampling=sampling)
    for one in (AutoregressiveDrafter(target), drafter)
]
assert sampled[0].text == sampled[1].text
assert sampled[0].text != plain.text
print("identical texts again")

# %% [markdown]
# ## Why it is lossless when drafts are drawn at random
#
# A drafter can also draw its guess at random, from a law of its own. The target then keeps a draft with probability
# `min(1, target_probs / draft_probs)` and otherwise draws from what it has more of than the draft,
# `max(0, target_probs - draft_probs)`, renormalised. Two things follow, and both can be seen in counts:
#
# * what comes out has the target's law, whatever the draft's was;
# * a draft is rejected with a probability that is the **total variation** of the two laws, half the sum of
#   `|target_probs - draft_probs|`. How close two models are is all that acceptance depends on.
#
# Two `tiny` models with different weights play target and draft, at several places of a text and at several
# temperatures. At each, many drafts are drawn and put to the rule that the loop uses.

# %%
import torch
from matplotlib import pyplot as plt

from specdec_lab.noise import HashedNoise
from specdec_lab.tree import chain
from specdec_lab.verify import reject

DRAWS = 400
other = load_tiny(device="cpu", seed=1)
ids = torch.tensor([drafted.output_ids[:8]])
with torch.no_grad():
    target_logits, draft_logits = (one.model(input_ids=ids).logits[0].double() for one in (target, other))

variations, rejected, came_out = [], [], torch.zeros(target.vocab_size)
for place in range(ids.shape[1]):
    for temperature in (0.5, 1.0, 4.0):
        target_probs = (target_logits[place] / temperature).softmax(dim=-1)
        draft_probs = (draft_logits[place] / temperature).softmax(dim=-1)
        refusals = 0
        for draw in range(DRAWS):
            chance = HashedNoise(0).chance((place, temperature, draw))
            draft = chance.draw(draft_probs)
            tree = chain(0, [draft], torch.stack([draft_probs, draft_probs]))
            path, token = reject(tree, lambda node, law=target_probs: law, chance)
            refusals += len(path) == 1
            if place == 0 and temperature == 0.5:
                came_out[draft if len(path) > 1 else token] += 1
        variations.append(0.5 * float((target_probs - draft_probs).abs().sum()))
        rejected.append(refusals / DRAWS)

figure, axes = plt.subplots(figsize=(4, 4))
axes.plot([0, 1], [0, 1], color="grey")
axes.plot(variations, rejected, "o")
axes.set(xlabel="total variation of target and draft", ylabel="share of drafts rejected")
plt.show()

worst = max(abs(one - other) for one, other in zip(variations, rejected, strict=True))
assert worst < 4 * (0.25 / DRAWS) ** 0.5  # four standard deviations of a share of so many draws
print("rejected as often as the laws differ")

# %% [markdown]
# And the tokens that came out at the first of these places, whose draft came from another model, follow the target:

# %%
law = (target_logits[0] / 0.5).softmax(dim=-1)
for token in law.argsort(descending=True)[:4].tolist():
    print(f"token {token:3}: target {law[token]:.3f}, came out {came_out[token] / DRAWS:.3f}")
assert float((came_out / DRAWS - law).abs().max()) < 4 * (0.25 / DRAWS) ** 0.5
print("the target's law came out")
