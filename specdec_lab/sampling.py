"""How the target's next token is chosen: parameters, and transformers' own processors in transformers' own order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_lab.errors import InputError
from specdec_lab.target import Target

LOWEST_TEMPERATURE = 1e-6
"""Below this, logits divided by the temperature come near the end of float32; 0 takes the maximum without dividing."""

Processor = Callable[..., Tensor]
"""A logits processor as transformers defines it: ``(ids [rows, tokens], scores [rows, vocab]) -> scores``."""

STATEFUL_PROCESSORS = frozenset(
    {
        "AlternatingCodebooksLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WhisperNoSpeechDetection",
    }
)
"""transformers' processors that remember earlier calls, or want other rows than one per sequence: a node of a tree is
processed only if it is visited, so neither could work."""


@dataclass(frozen=True)
class SamplingParams:
    """How the target's next token is chosen.

    Attributes:
        temperature: 0 is greedy: the maximum of the processed logits, without ``top_k``, ``top_p`` and ``min_p``.
        top_k: keep the k most likely tokens; ``None`` keeps all.
        top_p: keep the smallest set of tokens with at least this probability; ``None`` keeps all.
        min_p: keep tokens with at least this share of the top token's probability; ``None`` keeps all.
        repetition_penalty: divide positive logits of tokens that occurred (prompt included) by this, multiply negative
            ones; ``None`` or 1 changes nothing.
        bad_words: what must not occur, as texts or as token ids. A text is forbidden as the tokenizer writes it with
            and without a space before it; spelt with other tokens it can still occur, as in transformers.
        min_new_tokens: EOS is forbidden before the answer has this many tokens.
        seed: of the noise; one seed gives one text whichever strategy drafts.
        logits_processors: functions of your own, called as transformers calls them, each with the history of the node
            that it processes; they stand after the processors above and before temperature and cut-offs. They must not
            remember earlier calls, and must not edit the ids.

    Raises:
        InputError: a value outside its range, or a processor that cannot be honoured.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    seed: int = 0
    logits_processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < float("inf")):
            remedy = f"give 0 (greedy) or a finite number of at least {LOWEST_TEMPERATURE:g}"
            raise InputError("sampling.temperature", self.temperature, remedy)
        if self.top_k is not None and self.top_k < 1:
            raise InputError("sampling.top_k", self.top_k, "give a whole number of at least 1, or null")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError("sampling.top_p", self.top_p, "give a number above 0 and at most 1, or null")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise InputError("sampling.min_p", self.min_p, "give a number from 0 to 1, or null")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < float("inf"):
            remedy = "give a finite number above 0 (1 changes nothing), or null"
            raise InputError("sampling.repetition_penalty", self.repetition_penalty, remedy)
        if self.min_new_tokens < 0:
            raise InputError("sampling.min_new_tokens", self.min_new_tokens, "give a whole number of at least 0")
        if self.seed < 0:
            raise InputError("sampling.seed", self.seed, "give a whole number of at least 0")
        for name in ("bad_words", "logits_processors"):
            if isinstance(value := getattr(self, name), str) or not isinstance(value, Sequence):
                raise InputError(f"sampling.{name}", value, "give a tuple of them, even for a single one")
            frozen = tuple(tuple(one) if isinstance(one, list) else one for one in value)
            object.__setattr__(self, name, frozen)
        for word in self.bad_words:
            if not word or (isinstance(word, str) and not word.strip()):
                raise InputError("sampling.bad_words", word, "give words, or lists of token ids, that are not empty")
        for processor in self.logits_processors:
            if not callable(processor):
                remedy = "give functions (ids, scores) -> scores, in Python; a configuration file cannot name any"
                raise InputError("sampling.logits_processors", processor, remedy)
            if STATEFUL_PROCESSORS & {kind.__name__ for kind in type(processor).__mro__}:
                remedy = "it remembers earlier calls or wants rows of its own, which nodes of a tree do not give it"
                raise InputError("sampling.logits_processors", type(processor).__name__, remedy)

    @property
    def greedy(self) -> bool:
        """Whether the first maximum is taken and no noise is drawn."""
        return self.temperature == 0

    def check_budget(self, max_new_tokens: int) -> None:
        """Refuse a minimum length that the longest answer does not reach.

        Raises:
            InputError: it does not.
        """
        if self.min_new_tokens > max_new_tokens:
            remedy = f"give at most max_new_tokens, which is {max_new_tokens}"
            raise InputError("sampling.min_new_tokens", self.min_new_tokens, remedy)

    def record(self) -> dict[str, Any]:
        """Return the parameters as result files state them; functions by their names."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["bad_words"] = [word if isinstance(word, str) else list(word) for word in self.bad_words]
        values["logits_processors"] = [_name(processor) for processor in self.logits_processors]
        return values

    def warpers(self) -> LogitsProcessorList:
        """Return what shapes the law by the logits alone, in the order in which ``generate`` applies it."""
        warpers = LogitsProcessorList()
        if self.greedy:
            return warpers
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            warpers.append(TopPLogitsWarper(float(self.top_p)))
        if self.min_p is not None:
            warpers.append(MinPLogitsWarper(float(self.min_p)))
        return warpers


def _name(processor: Processor) -> str:
    return getattr(processor, "__qualname__", type(processor).__name__)


class Processing:
    """The processors of a run, resolved for one target.

    Raises:
        InputError: a bad word that the target's vocabulary does not have or cannot forbid.
    """

    def __init__(self, sampling: SamplingParams, target: Target) -> None:
        self.sampling, self._eos_ids = sampling, sorted(target.eos_ids)
        self._device = target.device
        self._before, self._after, self._warpers = [], list(sampling.logits_processors), sampling.warpers()
        bad_ids = _bad_ids(sampling.bad_words, target)
        self._bad_tokens = frozenset(ids[0] for ids in bad_ids if len(ids) == 1)
        if sampling.repetition_penalty not in (None, 1):
            self._before.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
        if bad_ids:
            self._before.append(NoBadWordsLogitsProcessor([list(ids) for ids in bad_ids], self._eos_ids or None))
        self._waits = sampling.min_new_tokens > 0 and bool(self._eos_ids)
        built_in = {type(one) for one in (*self._before, *self._warpers)}
        for processor in sampling.logits_processors:
            if type(processor) in built_in:
                remedy = "the sampling parameters bring one of this kind already; give one of the two"
                raise InputError("sampling.logits_processors", type(processor).__name__, remedy)

    @property
    def plain_greedy(self) -> bool:
        """Whether a node's token is the maximum of its raw logits."""
        return self.sampling.greedy and not self.needs_history

    @property
    def needs_history(self) -> bool:
        """Whether the tokens before a node matter, and not its logits alone."""
        return bool(self._before or self._after or self._waits)

    def processors(self, prompt_length: int, device: torch.device | str | None = None) -> LogitsProcessorList:
        """Return the processors of one sequence, in the order of ``GenerationMixin._get_logits_processor``.

        Args:
            device: where the scores are; the target's by default.
        """
        chosen = LogitsProcessorList(self._before)
        if self._waits:
            minimum, place = self.sampling.min_new_tokens, str(device or self._device)
            chosen.append(MinNewTokensLengthLogitsProcessor(prompt_length, minimum, self._eos_ids, place))
        return LogitsProcessorList([*chosen, *self._after, *self._warpers])

    def forbidden(self, answer_length: int) -> frozenset[int]:
        """Return tokens that the target cannot choose after so many tokens of the answer, whatever its logits."""
        waits = self._waits and answer_length < self.sampling.min_new_tokens
        return self._bad_tokens | frozenset(self._eos_ids) if waits else self._bad_tokens


def _bad_ids(bad_words: Sequence[str | tuple[int, ...]], target: Target) -> list[tuple[int, ...]]:
    """Return the distinct id sequences to forbid."""
    found: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        for ids in _encodings(word, target.tokenizer) if isinstance(word, str) else (tuple(word),):
            if not all(0 <= token < target.vocab_size for token in ids):
                raise InputError("sampling.bad_words", word, f"token ids run from 0 to {target.vocab_size - 1}")
            if len(ids) == 1 and ids[0] in target.eos_ids:
                remedy = "this is the end-of-sequence token, which bad words cannot forbid; use sampling.min_new_tokens"
                raise InputError("sampling.bad_words", word, remedy)
            found[ids] = None
    return list(found)


def _encodings(word: str, tokenizer: PreTrainedTokenizerBase | None) -> list[tuple[int, ...]]:
    if tokenizer is None:
        raise InputError("sampling.bad_words", word, "this target has no tokenizer; give token ids")
    texts = dict.fromkeys((word, f" {word.lstrip()}"))
    return [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
