"""What the target says at the nodes of a tree: its processed law there, and its own token.

Each node is processed with its own history: prompt, emitted tokens, and the path to the node. On a CPU only visited
nodes are, since top-p costs about 4 ms a node at a vocabulary of 49 k; elsewhere all nodes at once, so that a round
waits for the device once for tokens, and once more where a rule asks for whole laws.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specdec_lab.errors import NonFiniteLogitsError
from specdec_lab.noise import Key, Noise
from specdec_lab.sampling import Processing
from specdec_lab.target import TargetOutput
from specdec_lab.tree import DraftTree

NON_FINITE = "the target returned NaN or infinite logits; check its dtype, weights and logits processors"


class History:
    """Token ids of one sequence on the device, written in place, so that a node's history costs no copy of the text."""

    def __init__(self, tokens: Sequence[int], capacity: int, device: torch.device) -> None:
        self._ids = torch.zeros(1, capacity, dtype=torch.long, device=device)
        self._length = 0
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        self._write(tokens)
        self._length += len(tokens)

    def followed_by(self, drafts: Sequence[int]) -> Tensor:
        """Return committed tokens and drafts, ``[1, tokens]``; valid until the next call."""
        self._write(drafts)
        return self._ids[:, : self._length + len(drafts)]

    def _write(self, tokens: Sequence[int]) -> None:
        if tokens:
            end = self._length + len(tokens)
            self._ids[0, self._length : end] = torch.tensor(list(tokens), device=self._ids.device)


class SequenceRule:
    """What chooses the tokens of one sequence besides its logits: processors, history and the noise's key."""

    def __init__(
        self, processing: Processing, prompt: Sequence[int], max_new_tokens: int, key: Key, device: torch.device
    ) -> None:
        self.processors = processing.processors(len(prompt), device)
        self.key, self._prompt_length, self._processing = key, len(prompt), processing
        self._history = None
        if processing.needs_history:
            self._history = History(prompt, len(prompt) + max_new_tokens, device)
        self._nothing = torch.zeros(1, 0, dtype=torch.long, device=device)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take note of committed tokens."""
        if self._history is not None:
            self._history.extend(tokens)

    def history(self, drafts: Sequence[int]) -> Tensor:
        """Return what stands before the next token, ``[1, tokens]``; nothing where no processor asks for it."""
        return self._nothing if self._history is None else self._history.followed_by(drafts)

    def forbidden(self, length: int) -> frozenset[int]:
        """Return tokens that cannot follow the first ``length`` tokens of prompt and answer."""
        return self._processing.forbidden(length - self._prompt_length)


class Choices:
    """The target's law and its own token at each node of one tree.

    Args:
        logits: the target's raw logits, ``[nodes, vocab]``; they are not edited.
        length: committed tokens, the root included: the position of the token after the root.
    """

    def __init__(
        self, tree: DraftTree, logits: Tensor, length: int, rule: SequenceRule, noise: Noise, greedy: bool
    ) -> None:
        self._tree, self._logits, self._length, self._rule = tree, logits, length, rule
        self._noise, self._greedy = noise, greedy
        self._scores: dict[int, Tensor] = {}
        self._tokens: dict[int, int] = {}
        self._laws: dict[int, Tensor] = {}

    def position(self, node: int) -> int:
        """Return the position of the token after a node: how many tokens stand before it."""
        return self._length + self._tree.depths[node]

    def scores(self, node: int) -> Tensor:
        """Return the processed logits of the token after a node, ``[vocab]`` float32."""
        if node not in self._scores:
            ids = self._rule.history(self._drafts(node))
            self._scores[node] = processed(self._logits[node][None], ids, self._rule.processors)[0]
        return self._scores[node]

    def token(self, node: int) -> int:
        """Return the target's own token after a node; the same in whichever tree and round the position is reached.

        Raises:
            NonFiniteLogitsError: NaN, or no token is left with a finite logit.
        """
        if node not in self._tokens:
            scores = self.scores(node)
            key = (*self._rule.key, self.position(node))
            token = int(scores.argmax()) if self._greedy else self._noise.target_token(scores, key)
            if not bool(scores[token].isfinite()):
                raise NonFiniteLogitsError(NON_FINITE)
            self._tokens[node] = token
        return self._tokens[node]

    def law(self, node: int) -> Tensor:
        """Return the target's probabilities after a node, ``[vocab]`` float64, on the CPU.

        Raises:
            NonFiniteLogitsError: NaN or infinite logits, or all tokens are forbidden.
        """
        if node not in self._laws:
            self._laws[node] = self.scores(node).cpu().double().softmax(dim=-1)
        if not bool(self._laws[node].isfinite().all()):
            raise NonFiniteLogitsError(NON_FINITE)
        return self._laws[node]

    def process_all(self) -> None:
        """Process every node; those at one depth have histories of one length, which processors can take together."""
        depths = self._tree.depths
        for depth in range(self._tree.depth + 1):
            nodes = [node for node in range(len(self._tree)) if depths[node] == depth]
            ids = torch.cat([self._rule.history(self._drafts(node)).clone() for node in nodes])  # [nodes, tokens]
            scores = processed(self._logits[nodes], ids, self._rule.processors)  # [nodes, vocab]
            self._scores.update(zip(nodes, scores, strict=True))

    def tokens_of_all(self) -> Tensor:
        """Return each node's token and whether its score is finite, ``[nodes, 2]``, still on the device."""
        scores = self.scores_of_all()  # [nodes, vocab]
        noisy = scores
        if not self._greedy:
            depths = range(self._tree.depth + 1)
            keys = [(*self._rule.key, self._length + depth) for depth in depths]
            noise = torch.stack([self._noise.shared(scores.shape[-1], key, scores.device) for key in keys])
            noisy = scores + noise[list(self._tree.depths)]
        tokens = noisy.argmax(dim=-1)  # [nodes]
        finite = scores.gather(-1, tokens[:, None])[:, 0].isfinite()
        return torch.stack((tokens, finite.long()), dim=-1)

    def scores_of_all(self) -> Tensor:
        """Return every node's processed logits, ``[nodes, vocab]``, still on the device."""
        return torch.stack([self.scores(node) for node in range(len(self._tree))])

    def know(self, answers: Sequence[Sequence[int]]) -> None:
        """Take the tokens of all nodes once they have come from the device; an infinite one will be an error."""
        self._tokens = {node: token for node, (token, finite) in enumerate(answers) if finite}

    def know_laws(self, scores: Tensor) -> None:
        """Take the processed logits of all nodes, ``[nodes, vocab]``, once they have come from the device."""
        self._laws = dict(enumerate(scores.double().softmax(dim=-1)))

    def _drafts(self, node: int) -> Sequence[int]:
        return self._tree.drafts_to(node)


def choices_of_round(
    output: TargetOutput,
    trees: Mapping[int, DraftTree],
    rules: Mapping[int, SequenceRule],
    lengths: Mapping[int, int],
    processing: Processing,
    noise: Noise,
    *,
    all_at_once: bool,
    lawful: Collection[int] = (),
) -> dict[int, Choices]:
    """Return the choices of each row of a batch.

    Args:
        all_at_once: process every node of every tree before the walk asks. The maxima of raw logits are always found
            together.
        lawful: rows whose rule asks for whole laws.
    """
    greedy = processing.sampling.greedy
    choices = {
        row: Choices(trees[row], output.row_logits(row), lengths[row], rules[row], noise, greedy) for row in output.at
    }
    if processing.plain_greedy:
        answers = greedy_tokens(output.logits)
        for row, one in choices.items():
            one.know(answers[output.at[row]][: output.sizes[row]])
    elif all_at_once:
        for one in choices.values():
            one.process_all()
        counted = [one.tokens_of_all() for one in choices.values()]
        known = iter(torch.cat(counted).tolist())  # the round's one device synchronisation, for tokens
        for one, tokens in zip(choices.values(), counted, strict=True):
            one.know(list(islice(known, len(tokens))))
        if lawful:
            scores = [choices[row].scores_of_all() for row in lawful]
            laws = torch.cat(scores).cpu()  # a second one, for laws
            for row, part in zip(lawful, laws.split([len(one) for one in scores]), strict=True):
                choices[row].know_laws(part)
    return choices


def processed(logits: Tensor, ids: Tensor, processors: LogitsProcessorList) -> Tensor:
    """Return ``[nodes, vocab]`` logits after the processors, as float32, without editing them."""
    raw = logits.to(torch.float32, copy=True)
    return processors(cast(torch.LongTensor, ids), cast(torch.FloatTensor, raw))


def greedy_tokens(logits: Tensor) -> list[list[list[int]]]:
    """Return each node's first maximum and whether its logit is finite.

    Args:
        logits: ``[rows, nodes, vocab]``.

    Returns:
        ``[rows][nodes]`` pairs of token and 1 or 0.
    """
    wide = logits.float()  # argmax over bfloat16 takes 3.6 times as long on a CPU
    tokens = wide.argmax(dim=-1)  # [rows, nodes]
    finite = wide.gather(-1, tokens[..., None])[..., 0].isfinite()
    return torch.stack((tokens, finite.long()), dim=-1).tolist()  # the round's one device synchronisation
