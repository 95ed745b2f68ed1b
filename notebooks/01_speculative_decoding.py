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
