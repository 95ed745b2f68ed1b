"""Our loop against transformers' own ``generate`` on the same weights, end to end, prefill included."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import torch

from specdec_lab.decode import Request, speculative_decode
from specdec_lab.drafters.base import Drafter
from specdec_lab.measure.alternate import Sample
from specdec_lab.target import Target

PromptIds = tuple[int, ...]


def our_loop(target: Target, drafter: Drafter, max_new_tokens: int) -> Callable[[PromptIds], Sample]:
    """Return a system that decodes a prompt greedily with one strategy."""

    def run(prompt: PromptIds) -> Sample:
        target.synchronize()
        start = time.perf_counter()
        (*_, last) = speculative_decode(target, drafter, [Request(prompt, max_new_tokens)])
        target.synchronize()
        seconds = time.perf_counter() - start
        assert last.generation is not None
        return Sample(len(last.generation.output_ids), seconds)

    return run


def transformers_generate(
    target: Target, max_new_tokens: int, attention: str = "sdpa", **options: object
) -> Callable[[PromptIds], Sample]:
    """Return a system that decodes a prompt with the model's own ``generate``.

    Args:
        attention: attention function during the call; stock ``sdpa`` is what a user of transformers gets.
        options: passed on, such as ``prompt_lookup_num_tokens=8``.
    """

    def run(prompt: PromptIds) -> Sample:
        before = target.model.config._attn_implementation
        target.set_attention(attention)
        try:
            ids = torch.tensor([prompt], device=target.device)
            generate = cast(Callable[..., torch.Tensor], target.model.generate)
            target.synchronize()
            start = time.perf_counter()
            output = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(target.eos_ids),
                pad_token_id=min(target.eos_ids),
                **options,
            )
            target.synchronize()
            seconds = time.perf_counter() - start
        finally:
            target.set_attention(before)
        return Sample(output.shape[1] - len(prompt), seconds)

    return run
