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
# # Add a strategy
#
# A strategy is a class with one method: given the text so far, `propose` returns a tree of guesses. Everything else,
# the forward, the acceptance, the cache, stop rules, counting and timing, is shared by all strategies.
#
# The one below guesses that each token is followed by what followed it last time.

# %%
import random

from specdec_lab import generate
from specdec_lab.audit.strategies import TOY_SAMPLING, law_error
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.drafters.base import DraftContext, Drafter
from specdec_lab.drafters.ngram import NgramDrafter
from specdec_lab.target import Target
from specdec_lab.targets.tiny import load_tiny
from specdec_lab.tree import DraftTree, chain


class LastSuccessor(Drafter):
    """Follows the most recent successor of each token."""

    def __init__(self, target: Target, *, k: int = 4) -> None:
        super().__init__(target, max_nodes=k + 1)
        self.k = k

    def propose(self, context: DraftContext) -> DraftTree:
        """Return a chain, shorter where a token has no successor yet."""
        successor = dict(zip(context.tokens, context.tokens[1:], strict=False))
        drafts: list[int] = []
        while len(drafts) < min(self.k, context.max_depth):
            following = successor.get(drafts[-1] if drafts else context.tokens[-1])
            if following is None:
                break
            drafts.append(following)
        return chain(context.tokens[-1], drafts)


# %% [markdown]
# ## It drafts
#
# The text does not change, whatever a strategy guesses; what changes is the number of rounds.

# %%
target = load_tiny(device="cpu")
prompt = "the cat and the dog and the cat and the sun"
strategies = {
    "autoregressive": AutoregressiveDrafter(target),
    "ngram": NgramDrafter(target, k=4),
    "last_successor": LastSuccessor(target),
}
answers = {name: generate(target, drafter, prompt, max_new_tokens=96) for name, drafter in strategies.items()}
for name, answer in answers.items():
    print(f"{name:15} {len(answer.rounds):3} rounds, {sum(one.proposed_nodes for one in answer.rounds):3} drafts")
assert len({answer.output_ids for answer in answers.values()}) == 1
assert len(answers["last_successor"].rounds) < len(answers["autoregressive"].rounds)
print("one text")

# %% [markdown]
# ## It is lossless, and that is proved
#
# An audit runs the whole loop on a toy target of three tokens and follows *every* outcome of every random decision.
# The law of the answers is then exact, and its distance from the target's own is nothing but rounding.

# %%
worst = max(law_error(LastSuccessor, random.Random(0), sampling) for sampling in TOY_SAMPLING)
assert worst < 1e-12
print("proved lossless")

# %% [markdown]
# ## Make it everybody's
#
# Put the class into `specdec_lab/drafters/last_successor.py`, and beside it `conf/drafter/last_successor.yaml`:
#
# ```yaml
# _target_: specdec_lab.drafters.last_successor.LastSuccessor
# k: 4
# ```
#
# Nothing else is edited. `python scripts/benchmark.py strategies=[last_successor]` compares it,
# `drafter.last_successor.k=2,4,8` with `-m` sweeps it, `python scripts/audit.py drafter=last_successor` audits it on
# a real target, and the tests prove it without being told. CONTRIBUTING.md has the details.
