"""What a head is trained on: files of responses and conversations, read, checked, rendered and divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedTokenizerBase

from specdec_lab.bench.prompts import Prompt
from specdec_lab.config import PositiveInt
from specdec_lab.distill.batch import Example
from specdec_lab.distill.conversation_files import ConversationFile, parse_conversations
from specdec_lab.distill.fingerprints import template_sha256, tokenizer_fingerprint
from specdec_lab.distill.leak import read_evaluation, without_leaks
from specdec_lab.distill.prompt_files import PromptFile, read_bytes, read_prompt_files
from specdec_lab.distill.rendering import by_question, check_template, example_from_conversation, of_question
from specdec_lab.distill.response_files import ResponseSet, read_responses
from specdec_lab.distill.responses import SELF
from specdec_lab.distill.selection import first_tokens, in_seeded_order, in_validation, without_doubles
from specdec_lab.errors import InputError, listed

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
    repeats: Annotated[int, Field(strict=True, ge=0)] = 0


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
        for question_id, rows in by_question(responses.responses).items():
            made = of_question(prompts[question_id], rows, tokenizer, settings.max_tokens)
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
    single = in_seeded_order(without_doubles(labelled), settings.seed)
    counts = {
        NO_LABELS: len(found) - len(labelled),
        DOUBLED: len(labelled) - len(single),
        UNALIGNED: unaligned,
    }
    validates = [in_validation(words, settings.seed, settings.validation_share) for words, _ in single]
    rest = [example for (_, example), chosen in zip(single, validates, strict=True) if not chosen]
    validation = [example for (_, example), chosen in zip(single, validates, strict=True) if chosen]
    training = first_tokens(rest, settings.limit_tokens)
    if not training:
        names = listed([source.name for source in sources], most=3)
        left_out = ", ".join(f"{count} {reason}" for reason, count in {**raw.skipped, **counts}.items() if count)
        left_out = left_out or ("all are validated on" if validation else "there is no answer")
        remedy = f"no training example is left ({left_out}); give more data, or texts that "
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


def _named(example: Example, source: int, raw: RawData) -> Example:
    """Return an example whose key is unique among all sources."""
    if len(raw.answered) + len(raw.conversations) == 1:
        return example
    return replace(example, key=f"{source}:{example.key}")
