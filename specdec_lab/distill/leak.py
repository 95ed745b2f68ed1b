"""Keeps evaluation prompts out of the training data.

A text is compared as its words: NFKC, case folded, without punctuation and spaces. A training prompt leaks if one of
its turns

- has the same words, in order, as a turn of an evaluation file, or
- shares with such a turn at least half of the runs of 13 words of the one that has fewer distinct runs.

So an evaluation question inside a longer training prompt is found, and so is a training prompt cut out of an evaluation
text. A text of fewer than 13 words has no run, and only equality counts.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdec_lab.bench.prompts import Prompt, load_prompts
from specdec_lab.errors import InputError, listed

RUN_WORDS = 13
"""Words of a run."""

LEAK_SHARE = 0.5
"""Share of common runs from which on two texts count as one."""

MOST_LISTED = 20
"""Leaking prompts that an error names."""

Words = tuple[str, ...]


@dataclass(frozen=True)
class Leak:
    """A training prompt that is an evaluation prompt, or much of one.

    Attributes:
        evaluation: name of the evaluation file.
        evaluation_id: the question there.
        share: common runs over those of the text that has fewer; 1 for equal words.
    """

    question_id: int | str
    evaluation: str
    evaluation_id: int | str
    share: float

    def __str__(self) -> str:
        return f"{self.question_id} ({self.evaluation} {self.evaluation_id}, {100 * self.share:.0f} %)"


@dataclass
class Evaluation:
    """The turns of evaluation files, indexed by their words and runs."""

    _names: list[tuple[str, int | str]] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    _equal: dict[Words, int] = field(default_factory=dict)
    _holders: dict[Words, list[int]] = field(default_factory=dict)

    def add(self, file: str, prompts: Sequence[Prompt]) -> None:
        """Take the prompts of a file in."""
        for prompt in prompts:
            for turn in prompt.turns:
                at, words = len(self._names), words_of(turn)
                runs = runs_of(words)
                self._names.append((file, prompt.question_id))
                self._sizes.append(len(runs))
                self._equal.setdefault(words, at)
                for run in runs:
                    self._holders.setdefault(run, []).append(at)

    def leak(self, prompt: Prompt) -> Leak | None:
        """Return the first turn's leak, or ``None`` if no turn leaks."""
        return next(filter(None, (self._leak(prompt.question_id, turn) for turn in prompt.turns)), None)

    def _leak(self, question_id: int | str, text: str) -> Leak | None:
        words = words_of(text)
        if words and words in self._equal:
            return Leak(question_id, *self._names[self._equal[words]], 1.0)
        runs = runs_of(words)
        common = Counter(at for run in runs for at in self._holders.get(run, ()))
        shares = {at: count / min(len(runs), self._sizes[at]) for at, count in common.items()}
        worst = max(shares, key=lambda at: shares[at], default=None)
        if worst is None or shares[worst] < LEAK_SHARE:
            return None
        return Leak(question_id, *self._names[worst], shares[worst])


def words_of(text: str) -> Words:
    """Return a text's words as they are compared."""
    return tuple(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def runs_of(words: Words) -> set[Words]:
    """Return the distinct runs of ``RUN_WORDS`` words; none for a shorter text."""
    return {words[at : at + RUN_WORDS] for at in range(len(words) - RUN_WORDS + 1)}


def read_evaluation(paths: Sequence[str], where: str) -> Evaluation:
    """Read evaluation files, of any shape that ``load_prompts`` knows.

    Args:
        where: the setting that names the files, for messages.

    Raises:
        InputError: a file cannot be read.
    """
    evaluation = Evaluation()
    for path in paths:
        try:
            evaluation.add(Path(path).name, load_prompts(path).prompts)
        except InputError as error:
            field = where if error.field == "prompts.path" else error.field
            raise InputError(field, error.value, error.remedy) from None
    return evaluation


def without_leaks(
    prompts: Sequence[Prompt], evaluation: Evaluation, *, drop: bool, where: str
) -> tuple[tuple[Prompt, ...], tuple[Leak, ...]]:
    """Return the prompts that do not leak, and the leaks of the others.

    Args:
        drop: leave leaking prompts out; otherwise one is an error.
        where: the setting that names the prompts, for messages.

    Raises:
        InputError: lists the leaking prompts.
    """
    found = {prompt.question_id: evaluation.leak(prompt) for prompt in prompts}
    leaks = tuple(leak for leak in found.values() if leak is not None)
    if leaks and not drop:
        names = listed([str(leak) for leak in leaks], most=MOST_LISTED)
        remedy = f"prompts of the evaluation files are among them, by question: {names}; remove them or set "
        raise InputError(where, f"{len(leaks)} of {len(prompts)} prompts", f"{remedy}drop_leaks=true")
    return tuple(prompt for prompt in prompts if found[prompt.question_id] is None), leaks
