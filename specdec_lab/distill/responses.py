"""The target teaches: it answers prompts, and perhaps writes them itself, and every answer is kept as its token ids.

Answers come out of the only decode loop, with the baseline's strategy and the noise that every strategy shares, keyed
by question, turn and sample. So in float32 an answer depends neither on the batch nor on what was answered before it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from specdec_lab.bench.benchmark import threads
from specdec_lab.bench.console import progress
from specdec_lab.bench.files import storage
from specdec_lab.bench.prompts import Prompt
from specdec_lab.bench.run import enough_memory
from specdec_lab.bench.settings import changed_settings
from specdec_lab.chat import render_chat
from specdec_lab.config import PositiveInt, Threads, check_arguments, suggest, validate
from specdec_lab.decode import Request, speculative_decode
from specdec_lab.distill.fingerprints import template_sha256, tokenizer_fingerprint
from specdec_lab.distill.leak import Evaluation, read_evaluation, without_leaks, words_of
from specdec_lab.distill.prompt_files import PromptFile, read_prompt_files, refuse_equal_ids
from specdec_lab.distill.response_files import (
    MANIFEST,
    RESPONSES,
    WRITTEN,
    Response,
    ResponseKey,
    ResponseLog,
    check_folder,
    clear_folder,
    counts_of,
    pack,
    read_manifest,
    read_responses,
    write_manifest,
)
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.errors import InputError
from specdec_lab.provenance import package_versions
from specdec_lab.sampling import Processing, SamplingParams
from specdec_lab.strategies import plan_target
from specdec_lab.streaming import REPLACEMENT, Detokenizer
from specdec_lab.target import Target

GREEDY_SAMPLE = 0
"""The sample that is the greedy answer, and that later turns continue."""

SELF = "self"
"""Question id of the rows in which the target writes prompts, and category of those prompts."""

MOST_FAILURES = 20
"""Failed answers that the manifest describes."""

CHUNK_BATCHES = 16
"""Batches of prompts that are answered in the order of their lengths, before the next ones at random."""

NonNegative = Annotated[int, Field(strict=True, ge=0)]


class PromptSettings(BaseModel):
    """What is answered; ``conf/generate_responses.yaml`` explains each value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    paths: tuple[str, ...] = ()
    limit: PositiveInt | None = None
    categories: tuple[str, ...] | None = None
    self_written: NonNegative = 0
    openings: tuple[str, ...] = ()


class GenerationSettings(BaseModel):
    """Values of ``conf/generate_responses.yaml`` besides its groups; the file explains each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompts: PromptSettings = PromptSettings()
    samples: Annotated[tuple[NonNegative, ...], Field(min_length=1)] = (GREEDY_SAMPLE,)
    answered: tuple[str, ...] = ()
    max_prompt_tokens: PositiveInt = 256
    max_new_tokens: PositiveInt = 192
    batch_size: PositiveInt = 64
    seed: NonNegative = 0
    evaluation: tuple[str, ...] = ()
    drop_leaks: bool = False
    threads: Threads | None = None
    pack: bool = True
    resume: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class GenerationPlan:
    """Everything about a run that is known before the target is loaded.

    Attributes:
        sampling: of the drawn samples; the greedy one has the same processors.
        model: how the configuration names the target: ``model`` and ``revision``.
        prompts: that do not leak, in the order of their files.
        leaks: prompts that were left out since they leak.
        answered: responses of other runs, which are not made again.
    """

    settings: GenerationSettings
    sampling: SamplingParams
    load_target: Callable[[], Target]
    model: Mapping[str, Any]
    files: tuple[PromptFile, ...]
    prompts: tuple[Prompt, ...]
    evaluation: Evaluation
    leaks: int
    answered: Mapping[ResponseKey, Response] = field(default_factory=dict)


@dataclass
class Tally:
    """What a run left out, and why."""

    too_long: int = 0
    failed: list[str] = field(default_factory=list)
    written: Counter[str] = field(default_factory=Counter)


def plan_generation(config: Mapping[str, Any]) -> GenerationPlan:
    """Check a resolved configuration, as plain containers, read the prompts, and keep evaluation prompts out.

    Raises:
        InputError: names the first thing that is wrong.
    """
    config = dict(config)
    groups = {name: config.pop(name, None) or {} for name in ("target", "sampling")}
    for name, node in groups.items():
        if not isinstance(node, Mapping):
            raise InputError(name, node, f"this is a group of fields; set one of them, as {name}.FIELD=...")
    settings = validate(GenerationSettings, config)
    sampling = SamplingParams(**check_arguments(SamplingParams, groups["sampling"], "sampling"))
    sampling.check_budget(settings.max_new_tokens)
    _check_samples(settings, sampling)
    load_target = plan_target(groups["target"])
    stated = load_target.keywords
    evaluation = read_evaluation(settings.evaluation, "evaluation")
    files = read_prompt_files(settings.prompts.paths, "prompts.paths")
    refuse_equal_ids(files, "prompts.paths")
    read = chosen_prompts([prompt for file in files for prompt in file.prompts], settings.prompts)
    prompts, leaks = without_leaks(read, evaluation, drop=settings.drop_leaks, where="prompts.paths")
    if not prompts and not settings.prompts.self_written:
        remedy = "there is nothing to answer; give files, or prompts.self_written=COUNT"
        raise InputError("prompts.paths", list(settings.prompts.paths), remedy)
    if GREEDY_SAMPLE not in settings.samples and any(len(prompt.turns) > 1 for prompt in prompts):
        remedy = f"some prompts have several turns, and later ones continue the greedy answer; add {GREEDY_SAMPLE}"
        raise InputError("samples", list(settings.samples), remedy)
    return GenerationPlan(
        settings,
        sampling,
        load_target,
        {"model": _public_name(stated.get("model")), "revision": stated.get("revision")},
        files,
        prompts,
        evaluation,
        len(leaks),
        {row.key: row for path in settings.answered for row in read_responses(path, "answered").responses},
    )


def chosen_prompts(prompts: Sequence[Prompt], settings: PromptSettings) -> list[Prompt]:
    """Return the prompts of the wanted categories, at most as many as wanted, in their order.

    Raises:
        InputError: a category that no prompt has.
    """
    if settings.categories is not None:
        known = {prompt.category for prompt in prompts}
        for name in settings.categories:
            if name not in known:
                raise InputError("prompts.categories", name, f"no prompt is of it{suggest(name, known)}")
        prompts = [prompt for prompt in prompts if prompt.category in settings.categories]
    return list(prompts[: settings.limit])


def _check_samples(settings: GenerationSettings, sampling: SamplingParams) -> None:
    if len(set(settings.samples)) != len(settings.samples):
        raise InputError("samples", list(settings.samples), "a sample is in the list twice; name it once")
    draws = settings.prompts.self_written or set(settings.samples) != {GREEDY_SAMPLE}
    if draws and sampling.greedy:
        remedy = f"all samples but {GREEDY_SAMPLE}, and prompts of the target's own, are drawn; give more than 0"
        raise InputError("sampling.temperature", sampling.temperature, remedy)


def _public_name(model: str | None) -> str | None:
    """Return a hub id as it is, and the last part of a path: where a model lies on this machine is nobody's concern."""
    return Path(model).name if model and Path(model).expanduser().exists() else model


# --- the run ----------------------------------------------------------------------------------------------------------


def check_run(plan: GenerationPlan, folder: Path) -> None:
    """Decide whether a planned run may use its folder; nothing is loaded or written.

    Raises:
        InputError: the folder is not free, or ``resume`` would mix answers of different settings or prompts.
    """
    check_folder(folder, resume=plan.settings.resume, overwrite=plan.settings.overwrite)
    if plan.settings.resume and (folder / MANIFEST).exists():
        _refuse_changes(read_manifest(folder), _stated(plan), folder)
        for name in (RESPONSES, WRITTEN):
            ResponseLog(folder / name, resume=True)


def generate_responses(plan: GenerationPlan, folder: Path, err: Console) -> dict[str, Any]:
    """Load the target, answer every prompt that has no answer yet, and pack the answers.

    Args:
        plan: see ``plan_generation``.
        folder: the run folder, checked by ``check_run``; it exists.
        err: gets progress and warnings.

    Returns:
        The manifest.

    Raises:
        SpecdecError: the target cannot be loaded or the folder not be written; what was answered stays on disk.
    """
    with enough_memory():
        target = plan.load_target()
    if target.tokenizer is None:
        raise InputError("target", target.name, "answering prompts needs a tokenizer, and this target has none")
    Processing(plan.sampling, target)  # refuses what does not fit the target's vocabulary
    settings, tally = plan.settings, Tally()
    stated = {**_stated(plan), **_of_target(plan, target, target.tokenizer)}
    resumes = settings.resume and (folder / MANIFEST).exists()
    if resumes:
        _refuse_changes(read_manifest(folder), stated, folder)
    with threads(settings.threads, target), storage(folder), enough_memory():
        if settings.overwrite:
            clear_folder(folder)
        write_manifest(folder, {**stated, "complete": False})
        answerer = _Answerer(plan, target, target.tokenizer, AutoregressiveDrafter(target), tally, err)
        with ResponseLog(folder / RESPONSES, resume=resumes) as responses:
            prompts = list(plan.prompts)
            if settings.prompts.self_written:
                with ResponseLog(folder / WRITTEN, resume=resumes) as written:
                    answerer.write_prompts(written)
                    prompts += answerer.written_prompts(list(written.rows.values()))
            answerer.answer_all(prompts, responses)
            counts = {"prompts": len(prompts), "leaks_dropped": plan.leaks, **counts_of(responses.rows.values())}
        counts |= {"turns_too_long": tally.too_long, "failed": len(tally.failed), **_written_counts(tally)}
        failed = {"failed": tally.failed[:MOST_FAILURES]} if tally.failed else {}
        manifest = {**stated, "complete": not tally.failed, "counts": counts, **failed}
        write_manifest(folder, manifest)
        if settings.pack:
            pack(folder)
    return manifest


def _written_counts(tally: Tally) -> dict[str, Any]:
    return {"self_written": dict(tally.written)} if tally.written else {}


def _stated(plan: GenerationPlan) -> dict[str, Any]:
    """Return what the manifest says before the target is loaded."""
    settings = plan.settings
    return {
        "sampling": plan.sampling.record(),
        "samples": list(settings.samples),
        "max_prompt_tokens": settings.max_prompt_tokens,
        "max_new_tokens": settings.max_new_tokens,
        "openings": list(settings.prompts.openings),
        "answered": sorted(Path(path).name for path in settings.answered),
        "prompts": [{"name": file.name, "sha256": file.sha256, "prompts": len(file.prompts)} for file in plan.files],
    }


def _of_target(plan: GenerationPlan, target: Target, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    dtype = str(target.dtype).removeprefix("torch.")
    return {
        "target": {"name": target.name, **plan.model, "dtype": dtype},
        "tokenizer_sha256": tokenizer_fingerprint(tokenizer),
        "chat_template_sha256": template_sha256(tokenizer),
        "versions": package_versions(),
    }


SAME_ON_RESUME = (
    "sampling",
    "max_prompt_tokens",
    "max_new_tokens",
    "openings",
    "target",
    "tokenizer_sha256",
    "chat_template_sha256",
)
"""Fields of the manifest on which an answer depends. Others may change: samples and prompts can be added."""


def _refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on with a run whose answers were made in another way, or whose prompts are gone."""
    names = [name for name in SAME_ON_RESUME if name in now]
    changes = changed_settings({name: before.get(name) for name in names}, {name: now[name] for name in names})
    if changes:
        remedy = f"the run in {folder} was made with something else: {', '.join(changes)}; "
        raise InputError("resume", True, f"{remedy}give the same or another folder")
    known = {file["sha256"] for file in now["prompts"]}
    gone = [file["name"] for file in before.get("prompts", []) if file["sha256"] not in known]
    if gone:
        remedy = f"the run in {folder} answered another content of {', '.join(gone)}; restore it or give another folder"
        raise InputError("prompts.paths", [file["name"] for file in now["prompts"]], remedy)


@dataclass(frozen=True)
class _Todo:
    """One answer that is missing."""

    key: ResponseKey
    prompt_ids: tuple[int, ...]
    prompt: str | None = None


@dataclass(frozen=True)
class _Answerer:
    """What a run answers with."""

    plan: GenerationPlan
    target: Target
    tokenizer: PreTrainedTokenizerBase
    drafter: AutoregressiveDrafter
    tally: Tally
    err: Console

    def answer_all(self, prompts: Sequence[Prompt], responses: ResponseLog) -> None:
        """Answer what is not in the log: the greedy answers first, turn by turn, then drawn ones, sample by sample."""
        samples = self.plan.settings.samples
        drawn = [sample for sample in samples if sample != GREEDY_SAMPLE]
        turns = max((len(prompt.turns) for prompt in prompts), default=0)
        too_long: set[tuple[int | str, int]] = set()
        for chosen in ([GREEDY_SAMPLE] if GREEDY_SAMPLE in samples else [], drawn):
            for turn in range(turns) if chosen else ():
                contexts = self._contexts(prompts, turn, responses, too_long)
                self._answer(contexts, turn, chosen, responses)
        self.tally.too_long = len(too_long)

    def _contexts(
        self, prompts: Sequence[Prompt], turn: int, responses: ResponseLog, too_long: set[tuple[int | str, int]]
    ) -> list[tuple[Prompt, tuple[int, ...]]]:
        """Return the prompts whose turn can be answered, with what it is answered to."""
        contexts: list[tuple[Prompt, tuple[int, ...]]] = []
        for prompt in prompts:
            if turn >= len(prompt.turns):
                continue
            keys = [ResponseKey(prompt.question_id, at, GREEDY_SAMPLE) for at in range(turn)]
            earlier = [responses.rows.get(key) or self.plan.answered.get(key) for key in keys]
            answers = [
                answer_text(self.tokenizer, row.response_ids, row.finished) for row in earlier if row is not None
            ]
            if len(answers) < turn:  # an earlier turn was too long, or failed
                if (prompt.question_id, turn - 1) in too_long:
                    too_long.add((prompt.question_id, turn))
                continue
            ids = render_chat(self.tokenizer, turn_messages(prompt, answers))
            if len(ids) > self.plan.settings.max_prompt_tokens:
                too_long.add((prompt.question_id, turn))
            else:
                contexts.append((prompt, ids))
        return contexts

    def _answer(
        self,
        contexts: Sequence[tuple[Prompt, tuple[int, ...]]],
        turn: int,
        samples: Sequence[int],
        responses: ResponseLog,
    ) -> None:
        settings = self.plan.settings
        order = decoding_order([len(ids) for _, ids in contexts], CHUNK_BATCHES * settings.batch_size, settings.seed)
        todo: list[_Todo] = []
        for sample in samples:
            for at in order:
                prompt, ids = contexts[at]
                key = ResponseKey(prompt.question_id, turn, sample)
                if key not in responses.rows and key not in self.plan.answered:
                    todo.append(_Todo(key, ids, prompt.turns[0] if prompt.category == SELF else None))
        greedy = samples == [GREEDY_SAMPLE]
        sampling = replace(self.plan.sampling, temperature=0.0) if greedy else self.plan.sampling
        what = f"{'greedy' if greedy else 'drawn'} answers to turn {turn + 1}"
        done = len(contexts) * len(samples) - len(todo)
        self._decode(todo, settings.max_new_tokens, sampling, responses, what, done)

    def _decode(
        self,
        todo: Sequence[_Todo],
        max_new_tokens: int,
        sampling: SamplingParams,
        rows: ResponseLog,
        what: str,
        done: int,
    ) -> None:
        """Decode the missing answers and append each as it is finished."""
        if not todo:
            return
        requests = [Request(one.prompt_ids, max_new_tokens, noise_key=tuple(one.key)) for one in todo]
        batch_size = min(self.plan.settings.batch_size, len(requests))
        tokens, start = 0, time.perf_counter()
        with progress(self.err, len(todo) + done, done, what=what) as report:
            for step in speculative_decode(
                self.target, self.drafter, requests, sampling=sampling, batch_size=batch_size
            ):
                if step.generation is None:
                    continue
                key, answer = todo[step.index].key, step.generation
                if answer.error is not None:
                    self.tally.failed.append(f"question {key.question_id}, turn {key.turn}: {answer.error}")
                else:
                    rows.append(
                        Response(
                            question_id=key.question_id,
                            turn=key.turn,
                            sample=key.sample,
                            response_ids=answer.output_ids,
                            finished=answer.finish_reason == "eos",
                            prompt=todo[step.index].prompt,
                        )
                    )
                tokens += len(answer.output_ids)
                report(f"at {tokens / (time.perf_counter() - start):.0f} tokens/s")

    # --- prompts that the target writes itself ------------------------------------------------------------------------

    def write_prompts(self, written: ResponseLog) -> None:
        """Let the target write the user's turn, as often as asked: what it says where the template leaves that open.

        Each is drawn with the sampling of the drawn samples and ends where the model ends the turn (arXiv 2406.08464).
        Where openings are given the user's turn begins with one of them, by turns, and the target goes on.

        Raises:
            InputError: the longest prompt leaves no room for a user's turn.
        """
        settings = self.plan.settings
        start = open_user_turn(self.tokenizer)
        begun = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in settings.prompts.openings]
        room = settings.max_prompt_tokens - len(render_chat(self.tokenizer, [{"role": "user", "content": "a"}]))
        room -= max(map(len, begun), default=0)
        if room < 1:
            remedy = f"chat template and openings alone take {settings.max_prompt_tokens - room} tokens; give more"
            raise InputError("max_prompt_tokens", settings.max_prompt_tokens, remedy)
        count = settings.prompts.self_written
        keys = [ResponseKey(SELF, 0, number) for number in range(count)]
        todo = [
            _Todo(key, (*start, *(begun[key.sample % len(begun)] if begun else ())))
            for key in keys
            if key not in written.rows
        ]
        self._decode(todo, room, self.plan.sampling, written, "prompts of its own", count - len(todo))

    def written_prompts(self, written: Sequence[Response]) -> list[Prompt]:
        """Return the prompts among what the target has written; the others are counted by reason."""
        kept: list[Prompt] = []
        seen = {words_of(turn) for prompt in self.plan.prompts for turn in prompt.turns}
        for row in sorted(written, key=lambda row: row.sample):
            openings = self.plan.settings.prompts.openings
            begun = openings[row.sample % len(openings)] if openings else ""
            text = (begun + answer_text(self.tokenizer, row.response_ids, row.finished)).strip()
            prompt = Prompt(f"{SELF}/{row.sample}", SELF, (text,))
            reason = self._fault(row, text, prompt, seen)
            self.tally.written[reason or "kept"] += 1
            if reason is None:
                seen.add(words_of(text))
                kept.append(prompt)
        return kept

    def _fault(self, row: Response, text: str, prompt: Prompt, seen: set[tuple[str, ...]]) -> str | None:
        if row.sample >= self.plan.settings.prompts.self_written:
            return "beyond_count"
        if not row.finished:
            return "unfinished"
        words = words_of(text)
        if REPLACEMENT in text:
            return "garbled"
        if not words:
            return "blank"
        if words in seen:
            return "doubled"
        return "leaks" if self.plan.evaluation.leak(prompt) is not None else None


# --- pure parts -------------------------------------------------------------------------------------------------------


def answer_text(tokenizer: PreTrainedTokenizerBase, response_ids: Sequence[int], finished: bool) -> str:
    """Return an answer's text as the next turn of its conversation shows it: without EOS and special tokens."""
    return Detokenizer(tokenizer).decode(response_ids[:-1] if finished else response_ids)


def turn_messages(prompt: Prompt, answers: Sequence[str]) -> list[dict[str, str]]:
    """Return the conversation that the turn after ``answers`` is an answer to."""
    messages = [{"role": "user", "content": prompt.turns[0]}]
    for answer, question in zip(answers, prompt.turns[1:], strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return messages


def decoding_order(lengths: Sequence[int], chunk: int, seed: int) -> list[int]:
    """Return the order in which prompts are answered.

    Chunks are drawn at random, so that a run that is stopped has answered prompts of all kinds. Within a chunk prompts
    are sorted, up and down by turns, so that the rows of a batch hold texts of about one length, also between chunks.

    Args:
        lengths: tokens per prompt, ``[prompts]``.
        chunk: prompts of a chunk.
    """
    mixed = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    order: list[int] = []
    for number, start in enumerate(range(0, len(mixed), chunk)):
        part = sorted(mixed[start : start + chunk], key=lambda at: (lengths[at], at))
        order += reversed(part) if number % 2 else part
    return order


def open_user_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of a conversation up to where the user begins to speak: what every first message has in common.

    Raises:
        InputError: the tokenizer has no chat template that opens the user's turn.
    """
    texts = ("Hello", "what", "1", "(", "Ein")
    rendered = [render_chat(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    length = 0
    while len({ids[length : length + 1] for ids in rendered}) == 1 and length < min(map(len, rendered)):
        length += 1
    if tokenizer.chat_template is None or length == 0:
        remedy = "the target's tokenizer has no chat template whose user turn could be left open; leave it at 0"
        raise InputError("prompts.self_written", None, remedy)
    return rendered[0][:length]
