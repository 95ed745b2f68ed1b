"""From responses and conversations to training examples: ids through the one chat renderer, with the answers marked.

A response is supervised in exactly the ids that the target wrote, EOS included where it wrote one. A conversation of
somebody else's is supervised in each answer and in the token that ends the assistant's turn. Nothing else is: neither
prompts nor what the template writes between turns.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedTokenizerBase

from specdec_lab.bench.prompts import Prompt
from specdec_lab.chat import render_chat
from specdec_lab.config import PositiveInt
from specdec_lab.distill.batch import Example
from specdec_lab.distill.conversation_files import Conversation, ConversationFile, parse_conversations
from specdec_lab.distill.fingerprints import template_sha256, tokenizer_fingerprint
from specdec_lab.distill.leak import read_evaluation, without_leaks, words_of
from specdec_lab.distill.prompt_files import PromptFile, read_bytes, read_prompt_files
from specdec_lab.distill.response_files import Response, ResponseSet, read_responses
from specdec_lab.distill.responses import GREEDY_SAMPLE, SELF, answer_text, turn_messages
from specdec_lab.errors import InputError, listed

PROBE = "Go on."
"""What the user says after a conversation's last answer, so that the template closes it; cut off again."""

NO_LABELS, DOUBLED, LEAKS, UNALIGNED = "no_labels", "doubled", "leaks", "unaligned"
"""Why rows are left out: no label within ``max_tokens``; another row holds it; it is for evaluation; an answer's tokens
run into what the template writes before it, so that a prompt would not be what the target is asked."""


class DataSettings(BaseModel):
    """What a head is trained on; ``conf/data/default.yaml`` explains each value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    responses: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    conversations: tuple[str, ...] = ()
    learn_prompts: bool = False
    max_tokens: PositiveInt = 448
    limit_tokens: PositiveInt | None = None
    evaluation: tuple[str, ...] = ()
    drop_leaks: bool = False
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.02


@dataclass(frozen=True)
class Source:
    """One file of training texts.

    Attributes:
        name: of the file, without its folder.
        rows: responses or conversations in it that can be used.
        made_by: the target that its manifest states; ``None`` without a manifest.
    """

    name: str
    rows: int
    made_by: Mapping[str, Any] | None


@dataclass(frozen=True)
class DataReport:
    """What the examples come from and how many there are; part of a head's provenance.

    Attributes:
        prompts: sha256 of each prompt file, by name.
        rows: training examples.
        response_tokens: supervised tokens of the training examples.
        validation_rows: validation examples; no question is in both.
        validation_tokens: supervised tokens of the validation examples.
        skipped: how many rows were left out, by reason.
        tokenizer_sha256: of the tokenizer that rendered them.
        chat_template_sha256: of the template that rendered them.
    """

    sources: tuple[Source, ...]
    prompts: Mapping[str, str]
    rows: int
    response_tokens: int
    validation_rows: int
    validation_tokens: int
    skipped: Mapping[str, int]
    tokenizer_sha256: str
    chat_template_sha256: str

    def record(self) -> dict[str, Any]:
        """Return it as plain containers."""
        return asdict(self)


class TrainingData(NamedTuple):
    """Examples to train and to validate on, in an order that depends on their content and the seed alone."""

    training: list[Example]
    validation: list[Example]
    report: DataReport


@dataclass(frozen=True)
class RawData:
    """Training texts as they are on disk: read, checked, and without evaluation prompts; not tokenised yet.

    Attributes:
        answered: responses of each source, with the prompts that they answer, by question id.
        conversations: of each conversation file.
        skipped: rows that were left out, by reason.
    """

    answered: tuple[tuple[ResponseSet, Mapping[int | str, Prompt]], ...]
    conversations: tuple[ConversationFile, ...]
    prompts: Mapping[str, str]
    skipped: Mapping[str, int]


# --- from disk --------------------------------------------------------------------------------------------------------


def load_examples(settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> TrainingData:
    """Read everything that a head is trained on.

    Raises:
        InputError: see ``read_data`` and ``build_examples``.
    """
    return build_examples(read_data(settings), settings, tokenizer)


def read_data(settings: DataSettings) -> RawData:
    """Read and check all files; this needs no tokenizer, so that it can be done before a target is loaded.

    Raises:
        InputError: nothing is given, a file cannot be read, prompts are missing or are evaluation prompts.
    """
    if not settings.responses and not settings.conversations:
        remedy = "there is nothing to train on; give files of responses or conversations"
        raise InputError("data.responses", list(settings.responses), remedy)
    evaluation = read_evaluation(settings.evaluation, "data.evaluation")
    files = read_prompt_files(settings.prompts, "data.prompts")
    skipped: Counter[str] = Counter()
    answered: list[tuple[ResponseSet, Mapping[int | str, Prompt]]] = []
    for path in settings.responses:
        found = read_responses(path, "data.responses")
        prompts = answered_prompts(found, files)
        kept, _ = without_leaks(
            tuple(prompts.values()),
            evaluation,
            drop=settings.drop_leaks,
            where=f"data.prompts, answered in {found.name}",
        )
        clean = {prompt.question_id: prompt for prompt in kept}
        rows = tuple(row for row in found.responses if row.question_id in clean)
        skipped[LEAKS] += len(found.responses) - len(rows)
        answered.append((replace(found, responses=rows), clean))
    conversations: list[ConversationFile] = []
    for path in settings.conversations:
        file = parse_conversations(read_bytes(path, "data.conversations"), path)
        kept, _ = without_leaks(
            [one.prompt() for one in file.conversations],
            evaluation,
            drop=settings.drop_leaks,
            where=f"data.conversations, {file.name}",
        )
        numbers = {prompt.question_id for prompt in kept}
        clean = tuple(one for one in file.conversations if one.number in numbers)
        skipped[LEAKS] += len(file.conversations) - len(clean)
        skipped.update(file.skipped)
        conversations.append(replace(file, conversations=clean))
    return RawData(tuple(answered), tuple(conversations), {file.name: file.sha256 for file in files}, dict(+skipped))


def answered_prompts(found: ResponseSet, files: Sequence[PromptFile]) -> dict[int | str, Prompt]:
    """Return the prompts that responses answer, by question id.

    Responses with a manifest take them from the files whose hashes it names, others from all files.

    Raises:
        InputError: a file is missing or has changed, a question is in no file or in several, or a turn does not exist.
    """
    if found.manifest is not None:
        files = _named_files(found.name, found.manifest, files)
    known: dict[int | str, Prompt] = {}
    doubtful: set[int | str] = set()
    for file in files:
        for prompt in file.prompts:
            if known.setdefault(prompt.question_id, prompt).turns != prompt.turns:
                doubtful.add(prompt.question_id)
    used: dict[int | str, Prompt] = {}
    for row in found.responses:
        if row.prompt is not None:
            used[row.question_id] = Prompt(row.question_id, SELF, (row.prompt,))
            continue
        prompt = known.get(row.question_id)
        if prompt is None or row.turn >= len(prompt.turns):
            remedy = f"{found.name} answers turn {row.turn} of this question, which no file in data.prompts has"
            raise InputError("data.prompts", row.question_id, f"{remedy}; give the file that was answered")
        if row.question_id in doubtful:
            remedy = (
                f"{found.name} answers it, and several files in data.prompts have this question_id; give one of them"
            )
            raise InputError("data.prompts", row.question_id, remedy)
        used[row.question_id] = prompt
    return used


def _named_files(name: str, manifest: Mapping[str, Any], files: Sequence[PromptFile]) -> list[PromptFile]:
    """Return the prompt files that a manifest names by their hashes."""
    given = {file.sha256: file for file in files}
    named = manifest.get("prompts", [])
    for stated in named:
        if stated["sha256"] not in given:
            remedy = f"{name} answers the prompts of {stated['name']} (sha256 {stated['sha256'][:12]}...)"
            found = [f"{file.name} ({file.sha256[:12]}...)" for file in files]
            raise InputError("data.prompts", found, f"{remedy}; give that very file")
    return [given[stated["sha256"]] for stated in named]


# --- examples ---------------------------------------------------------------------------------------------------------


def build_examples(raw: RawData, settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> TrainingData:
    """Render what was read, and divide it.

    Raises:
        InputError: responses were made with another tokenizer or template, the template does not suit conversations, or
            nothing is left to train on.
    """
    fingerprint, template = tokenizer_fingerprint(tokenizer), template_sha256(tokenizer)
    sources: list[Source] = []
    found: list[tuple[str, Example]] = []  # with the user's first words, by which questions are told apart
    for responses, prompts in raw.answered:
        check_made_with(responses, fingerprint, template)
        for question_id, rows in _by_question(responses.responses).items():
            made = _of_question(prompts[question_id], rows, tokenizer, settings.max_tokens)
            found += [(prompts[question_id].turns[0], _named(example, len(sources), raw)) for example in made]
        sources.append(Source(responses.name, len(responses.responses), (responses.manifest or {}).get("target")))
    if raw.conversations:
        check_template(tokenizer)
    unaligned = 0
    for file in raw.conversations:
        for one in file.conversations:
            example = example_from_conversation(one, tokenizer, settings.max_tokens)
            if example is None:
                unaligned += 1
            else:
                found.append((one.prompt().turns[0], _named(example, len(sources), raw)))
        sources.append(Source(file.name, len(file.conversations), None))
    labelled = [pair for pair in found if pair[1].labels]
    single = without_doubles(labelled)
    counts = {
        NO_LABELS: len(found) - len(labelled),
        DOUBLED: len(labelled) - len(single),
        UNALIGNED: unaligned,
    }
    single.sort(key=lambda pair: _digest(settings.seed, np.array(pair[1].ids, dtype=np.int64).tobytes()))
    validates = [in_validation(words, settings.seed, settings.validation_share) for words, _ in single]
    rest = [example for (_, example), chosen in zip(single, validates, strict=True) if not chosen]
    validation = [example for (_, example), chosen in zip(single, validates, strict=True) if chosen]
    training = first_tokens(rest, settings.limit_tokens)
    if not training:
        names = listed([source.name for source in sources], most=3)
        left_out = ", ".join(f"{count} {reason}" for reason, count in {**raw.skipped, **counts}.items() if count)
        remedy = f"no training example is left ({left_out or 'all are validated on'}); give more data, or texts that "
        remedy += f"fit into data.max_tokens={settings.max_tokens}"
        raise InputError("data.responses", names, remedy)
    report = DataReport(
        sources=tuple(sources),
        prompts=raw.prompts,
        rows=len(training),
        response_tokens=sum(example.labels for example in training),
        validation_rows=len(validation),
        validation_tokens=sum(example.labels for example in validation),
        skipped={**raw.skipped, **{reason: count for reason, count in counts.items() if count}},
        tokenizer_sha256=fingerprint,
        chat_template_sha256=template,
    )
    return TrainingData(training, validation, report)


def check_made_with(found: ResponseSet, tokenizer_sha256: str, chat_template_sha256: str) -> None:
    """Refuse responses whose ids or prompts mean something else to this target.

    Raises:
        InputError: tokenizer or template of their manifest are others.
    """
    if found.manifest is None:
        return
    wanted = {"tokenizer_sha256": tokenizer_sha256, "chat_template_sha256": chat_template_sha256}
    for name, value in wanted.items():
        stated = found.manifest.get(name)
        if stated != value:
            made_by = (found.manifest.get("target") or {}).get("name")
            what = name.removesuffix("_sha256").replace("_", " ")
            remedy = f"{found.name} was made by {made_by} with another {what} (sha256 {str(stated)[:12]}..., here "
            remedy += f"{value[:12]}...); generate responses with this target"
            raise InputError("data.responses", found.name, remedy)


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
        for question_id, rows in _by_question(responses).items()
        for example in _of_question(by_id[question_id], rows, tokenizer, max_tokens)
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


def _by_question(responses: Iterable[Response]) -> dict[int | str, list[Response]]:
    grouped: dict[int | str, list[Response]] = {}
    for row in responses:
        grouped.setdefault(row.question_id, []).append(row)
    return grouped


def _of_question(
    prompt: Prompt, rows: Sequence[Response], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> list[Example]:
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


def _named(example: Example, source: int, raw: RawData) -> Example:
    """Return an example whose key is unique among all sources."""
    if len(raw.answered) + len(raw.conversations) == 1:
        return example
    return replace(example, key=f"{source}:{example.key}")


def with_prompts_learnt(examples: Sequence[Example], opening: Sequence[int]) -> list[Example]:
    """Mark the tokens of prompts as labels too, except those that the template opens every text with.

    The target has a law after every token, whoever wrote it, and the forwards that make it for the answers make it for
    the prompts. Heads are measured and their vocabularies chosen by the answers alone.

    Args:
        opening: see ``template_opening``.
    """
    found: list[Example] = []
    for example in examples:
        first = max(1, shared_length(example.ids, opening))  # nothing can foresee the first token
        marks = tuple(mark or at >= first for at, mark in enumerate(example.supervised))
        found.append(replace(example, supervised=marks))
    return found


def template_opening(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that a conversation begins with, whatever its first message says."""
    one, other = (render_chat(tokenizer, [{"role": "user", "content": text}]) for text in ("one", "2"))
    return one[: shared_length(one, other)]


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first ids two texts have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


# --- which of them ----------------------------------------------------------------------------------------------------


def without_doubles(found: Sequence[tuple[str, Example]]) -> list[tuple[str, Example]]:
    """Drop examples that another one holds: the same text and marks, or the beginning of them."""
    groups: dict[tuple[int, ...], list[tuple[str, Example]]] = {}
    for pair in sorted(found, key=lambda pair: -len(pair[1].ids)):
        example = pair[1]
        group = groups.setdefault(example.ids[: example.supervised.index(True)], [])
        if not any(_holds(longer, example) for _, longer in group):
            group.append(pair)
    return [pair for group in groups.values() for pair in group]


def _holds(longer: Example, example: Example) -> bool:
    size = len(example.ids)
    return longer.ids[:size] == example.ids and longer.supervised[:size] == example.supervised


def in_validation(first_words: str, seed: int, share: float) -> bool:
    """Return whether a question is validated on: a matter of its words alone, so that more data moves none of them."""
    return _digest(seed, " ".join(words_of(first_words)).encode()) < share * 2**64


def first_tokens(examples: Sequence[Example], limit: int | None) -> list[Example]:
    """Return examples from the start until they have ``limit`` labels, so that a smaller limit gives a subset."""
    chosen: list[Example] = []
    labels = 0
    for example in examples:
        if limit is not None and labels >= limit:
            break
        chosen.append(example)
        labels += example.labels
    return chosen


def _digest(seed: int, data: bytes) -> int:
    """Return 64 bits that depend on seed and data alone."""
    digest = hashlib.blake2b(data, digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")
