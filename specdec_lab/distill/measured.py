"""The real acceptance of a head: it drafts for a few prompts in the engine, as it would in a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_lab.cost import EVERY_NODE_PAYS
from specdec_lab.decode import Request, speculative_decode
from specdec_lab.distill.learner import Learner
from specdec_lab.errors import SpecdecError


def measure_on(
    prompts: Sequence[tuple[int, ...]], max_new_tokens: int, settings: Mapping[str, Any]
) -> Callable[[Learner], dict[str, float]]:
    """Return a function that measures a head's acceptance on some prompts, greedily.

    Args:
        prompts: rendered, ``[prompts][tokens]``.
        settings: of the strategy, where they differ from its defaults.

    Returns:
        A function of the learner. Its numbers: ``real_acceptance_length`` (emitted tokens per round, bonus included)
        and ``real_accepted/depthD`` (share of rounds that accepted at least D drafts).

    Raises:
        SpecdecError: from that function, if a prompt could not be decoded.
    """

    def measure(learner: Learner) -> dict[str, float]:
        requests = [Request(prompt, max_new_tokens) for prompt in prompts]
        accepted: list[int] = []
        emitted = 0
        with learner.serving():
            drafter = learner.drafter(verify_ms=EVERY_NODE_PAYS, **settings)
            for progress in speculative_decode(learner.target, drafter, requests):
                generation = progress.generation
                if generation is None:
                    continue
                if generation.error is not None:
                    raise SpecdecError(f"the head could not be measured: {generation.error}")
                accepted += [one.accepted for one in generation.rounds]
                emitted += sum(one.accepted + one.bonus for one in generation.rounds)
        if not accepted:
            return {}
        joint = {
            f"real_accepted/depth{depth}": sum(count >= depth for count in accepted) / len(accepted)
            for depth in range(1, max(accepted) + 1)
        }
        return {"real_acceptance_length": emitted / len(accepted), **joint}

    return measure
