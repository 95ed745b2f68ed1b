"""Untrained heads for any target: their drafts are mostly wrong, sometimes right, and never matter to the text."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_lab.heads.decoder import start_small
from specdec_lab.heads.eagle import EagleHead
from specdec_lab.heads.eagle3 import Eagle3Head
from specdec_lab.heads.medusa import MedusaHeads
from specdec_lab.heads.shape import layer_config
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target


def every_other(target: Target) -> DraftVocabulary:
    """Return a draft vocabulary that lacks half of the target's ids."""
    return DraftVocabulary(torch.arange(0, target.vocab_size, 2), target.vocab_size)


def medusa_heads(target: Target, heads: int = 3, vocabulary: DraftVocabulary | None = None) -> MedusaHeads:
    made = MedusaHeads(target.hidden_size, vocabulary or DraftVocabulary.whole(target.vocab_size), heads, blocks=1)
    return disturbed(made)


def eagle_head(target: Target, vocabulary: DraftVocabulary | None = None, seed: int = 0, layers: int = 1) -> EagleHead:
    config = layer_config(target, layers=layers)
    return disturbed(EagleHead(config, vocabulary or DraftVocabulary.whole(target.vocab_size)), seed)


def two_layer_eagle_head(target: Target, vocabulary: DraftVocabulary | None = None) -> EagleHead:
    return eagle_head(target, vocabulary, layers=2)


def eagle3_head(target: Target, vocabulary: DraftVocabulary | None = None, seed: int = 0) -> Eagle3Head:
    layers = target.model.config.get_text_config().num_hidden_layers
    picks = (0, layers // 2, layers) if layers > 1 else (0, 1)
    made = Eagle3Head(layer_config(target), vocabulary or DraftVocabulary.whole(target.vocab_size), picks)
    return disturbed(made, seed)


def disturbed(head, seed: int = 0):
    start_small(head, torch.Generator().manual_seed(seed), spread=0.2)
    return head.eval()


def greedy_continuation(target: Target, ids: Tensor, count: int) -> list[int]:
    """Return the target's greedy tokens after a text, by plain forwards without a cache."""
    ids = ids.clone()
    for _ in range(count):
        following = target.model(input_ids=ids[None], use_cache=False).logits[0, -1].argmax()
        ids = torch.cat((ids, following[None]))
    return ids[-count:].tolist()
