"""Responses and conversations as ids, through the one chat renderer, with the answers marked.

A response is supervised in exactly the ids that the target wrote, EOS included where it wrote one. A conversation of
somebody else's is supervised in each answer and in the token that ends the assistant's turn. Nothing else is: neither
prompts nor what the template writes between turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from specdec_lab.bench.prompts import Prompt
from specdec_lab.chat import render_chat
from specdec_lab.distill.batch import Example
from specdec_lab.distill.conversation_files import Conversation
from specdec_lab.distill.response_files import Response
from specdec_lab.distill.responses import GREEDY_SAMPLE, answer_text, turn_messages
from specdec_lab.errors import InputError

PROBE = "Go on."
"""What the user says after a conversation's last answer, so that the template closes it; cut off again."""


def examples_from_responses(
    prompts: Iterable[Prompt], responses: Iterable[Response], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> list[Example]:
    """Return the examples that responses give; each response is supervised in one of them.

    The greedy answers to all turns of a question make one example, a drawn answer makes one of its own, behind the
    greedy answers to the turns before it.

    Args:
        prompts: the answered ones.
        max_tokens: longer examples lose their end; those without a label then have none.

    Raises:
        InputError: an answer to an earlier turn is missing.
    """
    by_id = {prompt.question_id: prompt for prompt in prompts}
    return [
        example
        for question_id, rows in by_question(responses).items()
        for example in of_question(by_id[question_id], rows, tokenizer, max_tokens)
    ]


def example_from_conversation(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> Example | None:
    """Return a conversation as it is, with each answer and the token that ends it supervised.

    What stands before each answer is exactly what ``render_chat`` gives for the conversation up to there. Where that is
    not so, there is no example: the answer's first characters and the template's last ones share a token.

    Raises:
        InputError: the template does not end an answer with a special token.
    """
    messages = list(conversation.messages)
    whole = render_chat(tokenizer, [*messages, {"role": "user", "content": PROBE}])
    special = frozenset(tokenizer.all_special_ids)
    special |= {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    marks, end = [False] * len(whole), 0
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        context = render_chat(tokenizer, messages[:at])
        if whole[: len(context)] != context:
            return None
        start = len(context)
        end = next((place + 1 for place in range(start, len(whole)) if whole[place] in special), 0)
        if not end:
            remedy = (
                "the target's chat template ends an answer with no special token, so that no head can learn the end"
            )
            raise InputError(conversation.where, "assistant", f"{remedy}; let the target answer the prompts instead")
        marks[start:end] = [True] * (end - start)
    cut = min(end, max_tokens)
    return Example(str(conversation.number), whole[:cut], tuple(marks[:cut]))


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a template that renders earlier turns differently once a conversation goes on.

    Raises:
        InputError: a conversation cannot be trained on as a whole, since no prompt looks like its beginning.
    """
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate("abcde")]
    whole = render_chat(tokenizer, messages)
    for turns in (1, 3):
        context = render_chat(tokenizer, messages[:turns])
        if whole[: len(context)] != context:
            remedy = "the target's chat template renders earlier turns differently once a conversation goes on; "
            raise InputError("data.conversations", None, f"{remedy}let the target answer the prompts instead")


def template_opening(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that a conversation begins with, whatever its first message says."""
    one, other = (render_chat(tokenizer, [{"role": "user", "content": text}]) for text in ("one", "2"))
    return one[: shared_length(one, other)]


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first ids two texts have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def by_question(responses: Iterable[Response]) -> dict[int | str, list[Response]]:
    """Return responses by the question that they answer."""
    grouped: dict[int | str, list[Response]] = {}
    for row in responses:
        grouped.setdefault(row.question_id, []).append(row)
    return grouped


def of_question(
    prompt: Prompt, rows: Sequence[Response], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> list[Example]:
    """Return the examples that the responses to one question give; see ``examples_from_responses``."""
    greedy = {row.turn: row for row in rows if row.sample == GREEDY_SAMPLE}
    contexts: list[tuple[int, ...]] = []
    answers: list[str] = []
    for turn in range(max(row.turn for row in rows) + 1):
        contexts.append(render_chat(tokenizer, turn_messages(prompt, answers)))
        if turn in greedy:
            answers.append(answer_text(tokenizer, greedy[turn].response_ids, greedy[turn].finished))
        elif any(row.turn > turn for row in rows):
            remedy = f"there is no greedy answer to its turn {turn}, which later ones continue; restore that response"
            raise InputError("data.responses", prompt.question_id, remedy)
    examples = [_alone(row, contexts[row.turn], max_tokens) for row in rows if row.sample != GREEDY_SAMPLE]
    return _chained(greedy, contexts, max_tokens) + examples


def _alone(row: Response, context: tuple[int, ...], max_tokens: int) -> Example:
    marks = (False,) * len(context) + (True,) * len(row.response_ids)
    key = f"{row.question_id}/{row.turn}/{row.sample}"
    return Example(key, (*context, *row.response_ids)[:max_tokens], marks[:max_tokens])


def _chained(greedy: Mapping[int, Response], contexts: Sequence[tuple[int, ...]], max_tokens: int) -> list[Example]:
    """Return the greedy answers of a question in one example.

    An earlier answer is marked within the last one's context. Where it stands there in other tokens, it gets an example
    of its own: the text of an answer need not have the tokens that it was written in, and a template may shorten it.
    """
    if not greedy:
        return []
    last = greedy[max(greedy)]
    whole = _alone(last, contexts[last.turn], max_tokens)
    marks, others = list(whole.supervised), []
    for turn, row in sorted(greedy.items()):
        if turn == last.turn:
            continue
        told = (*contexts[turn], *row.response_ids)
        if contexts[last.turn][: len(told)] == told:
            start = len(contexts[turn])
            marks[start : len(told)] = [True] * len(marks[start : len(told)])
        else:
            others.append(_alone(row, contexts[turn], max_tokens))
    return [*others, replace(whole, supervised=tuple(marks))]
