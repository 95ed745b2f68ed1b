"""Where a head begins: at the weights of another head of its kind, in place of fresh ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from specdec_lab.distill.learner import Learner
from specdec_lab.errors import InputError
from specdec_lab.heads.draft_lm_files import is_draft_model, load_draft_model
from specdec_lab.heads.formats import load_head
from specdec_lab.heads.shipped import head_source
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target

FIELD = "start"


def start_head(kind: str, source: str, target: Target) -> tuple[nn.Module, Mapping[str, Any]]:
    """Load a head in float32, and the facts it states about itself.

    Args:
        kind: of the head.
        source: folder, hub id, or ``shipped``.

    Raises:
        InputError: there is none of this kind, or it was made for another target.
    """
    folder = head_source(kind, source, target, FIELD)
    try:
        if kind != "draft_model":
            return load_head(kind, folder, target, dtype=torch.float32)  # pyright: ignore[reportArgumentType]
        if not is_draft_model(folder):
            raise InputError(FIELD, source, "this is no folder of a draft model that was made from its target")
        return load_draft_model(folder, target)
    except InputError as error:
        raise InputError(FIELD, error.value, error.remedy) from error


def started(
    make: Callable[[Target, Tensor], Learner],
    kind: str,
    source: str,
    target: Target,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Learner, Mapping[str, Any]]:
    """Return a learner whose head has another one's draft vocabulary and weights, and that one's facts.

    Args:
        make: builds the learner from the counts of its labels.
        settings: of the head, as the configuration states them; a refusal names those that the other one differs in.

    Raises:
        InputError: the other head has another shape; with the settings that it was trained with, if it states them.
    """
    head, facts = start_head(kind, source, target)
    words = differing_settings(facts, settings)
    known = f"it was trained with {words}, so give these"

    def refusal(reason: str, remedy: str) -> InputError:
        return InputError(FIELD, source, f"{reason}; {known if words else remedy}")

    vocabulary = head.vocabulary
    assert isinstance(vocabulary, DraftVocabulary)
    counts = torch.zeros(target.vocab_size, dtype=torch.long)
    counts[vocabulary.token_ids.cpu()] = 1  # so that the most frequent labels are just those
    learner = make(target, counts)
    own = learner.vocabulary
    if not torch.equal(own.token_ids.cpu(), vocabulary.token_ids.cpu()):
        raise refusal(
            f"it drafts {len(vocabulary)} ids and this head {len(own)}", f"give head.draft_vocab={len(vocabulary)}"
        )
    if getattr(head, "context_vocab", False) and not learner.context_vocab:
        raise refusal("it drafts what its text holds too", "give head.context_vocab=true")
    for name, stated, own_one in other_shape(head, learner.head):
        reason = f"its {name} is {stated!r}, and heads that are trained here have {own_one!r} with these settings"
        raise refusal(reason, "give the settings it was trained with, if there are any")
    pairs = getattr(head, "transitions", None)
    weight, own_weight = 0.0 if pairs is None else pairs.weight, getattr(learner, "transitions", 0.0)
    if weight != own_weight:
        raise refusal(
            f"it guesses beside pairs with a weight of {weight}, not {own_weight}", f"give head.transitions={weight}"
        )
    try:
        learner.begin_at(head)
    except RuntimeError as error:  # load_state_dict names the weights that differ
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise refusal(f"it has another shape ({first})", "give the same head.* settings") from error
    return learner, facts


def differing_settings(facts: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return the settings of a head that it states to have been trained with, where these differ, as one would type.

    Args:
        facts: of the head.
        settings: of the head that is to begin there.
    """
    training = facts.get("training")
    stated = training.get("head") if isinstance(training, Mapping) else None
    if not isinstance(stated, Mapping):
        return ""
    differ = [name for name, value in stated.items() if name in settings and settings[name] != value]
    return " ".join(f"head.{name}={typed(stated[name])}" for name in differ if not isinstance(stated[name], Mapping))


def typed(value: Any) -> str:
    """Return a plain value as a command line takes it."""
    return json.dumps(value, separators=(",", ":")).replace('"', "")


SHAPE = ("rope_parameters", "rms_norm_eps", "hidden_act", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Fields of a recurrent head's configuration that no weight tells apart."""


def other_shape(head: nn.Module, own: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield in which respects a head would run otherwise with the weights of another: name, its value, the own one."""
    names = [("feature_layers", head, own)]
    configs = [getattr(one, "config", None) for one in (head, own)]
    if all(config is not None for config in configs):
        names += [(name, *configs) for name in SHAPE]
    for name, theirs, ours in names:
        stated, own_one = getattr(theirs, name, None), getattr(ours, name, None)
        if own_one is not None and stated != own_one:
            yield name, stated, own_one
