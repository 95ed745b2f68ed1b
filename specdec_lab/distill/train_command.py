"""The command line of a training: from Hydra's configuration to an exit code, in one process or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import Tensor

from specdec_lab.bench.benchmark import log_to, threads
from specdec_lab.bench.files import CONFIG, storage, write_atomically
from specdec_lab.bench.processes import check_all_joined, on_cpu
from specdec_lab.bench.prompts import load_prompts
from specdec_lab.bench.run import enough_memory
from specdec_lab.chat import render_chat
from specdec_lab.command import (
    INTERRUPTED,
    SUCCESS,
    concluded,
    go_on,
    in_sweep,
    plain_config,
    run_job,
    say,
)
from specdec_lab.config import check_arguments, locate, validate
from specdec_lab.distill.batch import Example
from specdec_lab.distill.feature_cache import prepare_cache
from specdec_lab.distill.features import CachedFeatures, FeatureSource, OnlineFeatures
from specdec_lab.distill.fingerprints import template_sha256, tokenizer_fingerprint
from specdec_lab.distill.history import Row, last_evaluation
from specdec_lab.distill.learner import Learner
from specdec_lab.distill.loop import EXAMPLES, TrainPlan, TrainResult, own_randomness, refuse_other_settings, train
from specdec_lab.distill.measured import measure_on
from specdec_lab.distill.preflight import PreflightSettings, Rendering, run_preflight
from specdec_lab.distill.rendering import template_opening
from specdec_lab.distill.repeats import repeated_texts
from specdec_lab.distill.schedule import derived_seed
from specdec_lab.distill.selection import with_prompts_learnt
from specdec_lab.distill.start import FIELD as START
from specdec_lab.distill.start import started
from specdec_lab.distill.train_files import CHECKPOINTS, LOG, check_run_folder
from specdec_lab.distill.train_settings import TrainSettings
from specdec_lab.distill.train_tracking import tracked
from specdec_lab.distill.training_data import DataSettings, RawData, build_examples, read_data
from specdec_lab.distill.training_state import stated_settings
from specdec_lab.errors import InputError
from specdec_lab.heads.facts import training_seeds
from specdec_lab.provenance import provenance
from specdec_lab.strategies import plan_target, without_target
from specdec_lab.target import Target
from specdec_lab.tracking import TrackingSettings, check_tracking, tracking_settings

GROUPS = ("target", "head", "data", "tracking")

MEASURED_WITH = {"eagle": {"min_probability": 0.1}, "eagle3": {"min_probability": 0.1}}
"""Settings of the strategies that real acceptance is measured with: it stays what it was when their defaults change."""


@dataclass(frozen=True)
class TrainJob:
    """Everything about a training that is known before the target is loaded.

    Attributes:
        config: the resolved configuration, as ``config.yaml`` states it.
        kind: of the head.
        make_learner: builds the head for a target and the counts of its labels.
    """

    config: Mapping[str, Any]
    settings: TrainSettings
    data: DataSettings
    load_target: Callable[[], Target]
    kind: str
    make_learner: Callable[[Target, Tensor], Learner]
    tracking: TrackingSettings | None


def train_job(config: DictConfig) -> None:
    """Train one head inside Hydra; paths are relative to the folder of the launch.

    Raises:
        SystemExit, JobFailedError, KeyboardInterrupt: see ``run_job``.
    """
    run_job(config, _run)


def plan_training(config: Mapping[str, Any]) -> TrainJob:
    """Check a resolved configuration, as plain containers; nothing is loaded.

    Raises:
        InputError: names the first thing that is wrong.
    """
    config = dict(config)
    groups = {name: config.pop(name, None) or {} for name in GROUPS}
    for name, node in groups.items():
        if not isinstance(node, Mapping):
            raise InputError(name, node, f"this is a group of fields; set one of them, as {name}.FIELD=...")
    settings = validate(TrainSettings, config)
    if settings.max_steps == 0 and settings.start is None:
        raise InputError(
            "max_steps", 0, "without steps a head is only measured; name it with start=, or give more steps"
        )
    load_target = plan_target(groups["target"])
    learner_class: Any = locate(groups["head"].get("_target_"), "head")
    if not (isinstance(learner_class, type) and issubclass(learner_class, Learner)):
        raise InputError("head._target_", groups["head"].get("_target_"), "this is no Learner class; name one")
    if settings.max_steps == 0 and not learner_class.whole_start:
        remedy = "it is trained together with its target, and start= names its heads alone; measure it in a benchmark"
        raise InputError("max_steps", 0, remedy)
    made_with = check_arguments(learner_class, without_target(groups["head"], "head"), "head", ("target", "counts"))
    tracking = tracking_settings(groups["tracking"])
    if tracking is not None:
        check_tracking(tracking, ["training"])
    return TrainJob(
        config={**groups, **config},
        settings=settings,
        data=validate(DataSettings, groups["data"], "data"),
        load_target=load_target,
        kind=learner_class.kind,
        make_learner=partial(learner_class, **made_with),
        tracking=tracking,
    )


def _run(config: DictConfig, own_folder: Path) -> int:
    """Train, and return the exit code; the main process alone says anything."""
    processes = PartialState(cpu=on_cpu(OmegaConf.select(config, "target.device")))
    quiet = not processes.is_main_process
    out, err = Console(quiet=quiet), Console(stderr=True, quiet=quiet)
    folder = Path(broadcast_object_list([str(own_folder)])[0])
    if folder != own_folder:
        with suppress(OSError):  # Hydra made one for each process, and the main one's is used
            own_folder.rmdir()
    try:
        return concluded(lambda: _run_in(folder, processes, in_sweep(plain_config(config)), out, err), err)
    finally:
        processes.destroy_process_group()


def _run_in(folder: Path, processes: PartialState, config: Mapping[str, Any], out: Console, err: Console) -> int:
    check_all_joined(processes.num_processes)
    job = plan_training(config)
    check_run_folder(folder, resume=job.settings.resume, overwrite=job.settings.overwrite)
    begun = stated_settings(folder / CHECKPOINTS) if job.settings.resume else None
    if begun is not None:  # what is to be learnt is compared when it has been read
        begun.pop(EXAMPLES, None)
        refuse_other_settings(begun, {**training_identity(job), **job.settings.fixed(processes.num_processes)})
    raw = read_data(job.data)
    processes.wait_for_everyone()  # until all have looked at the folder
    try:
        with _log(folder, err, processes):
            result = run_training(job, raw, folder, err, main=processes.is_main_process)
    except KeyboardInterrupt:  # the loop itself ends after its step
        say(err, f"interrupted before the first step; go on with: {go_on(folder)}")
        raise
    if result.interrupted:
        say(err, f"interrupted after step {result.step} of {result.steps}; go on with: {go_on(folder)}")
        return INTERRUPTED
    if found := found_at_last(result.rows):
        say(out, found)
    say(out, f"head: {result.head}")
    return SUCCESS


def training_identity(job: TrainJob) -> dict[str, Any]:
    """Return what must stay the same where a training goes on, besides the settings of the loop."""
    identity: dict[str, Any] = {name: {**job.config[name]} for name in ("head", "target")}
    identity["target"].pop("device", None)
    identity["learn_prompts"] = job.data.learn_prompts
    identity["repeats"] = 0 if job.settings.max_steps == 0 else job.data.repeats
    return identity


def found_at_last(rows: Sequence[Row]) -> str:
    """Return what the last evaluation of a training found, in one line for a reader; empty without one."""
    last = last_evaluation(rows) or {}
    named = {
        "accuracy/depth1/top1": "first choice right at {:.1%} of the validation texts' tokens",
        "simulated_acceptance_length": "simulated acceptance length {:.2f}",
        "real_acceptance_length": "real acceptance length {:.2f}, every node paid",
    }
    return "; ".join(words.format(last[name]) for name, words in named.items() if last.get(name) is not None)


def run_training(job: TrainJob, raw: RawData, folder: Path, err: Console, *, main: bool) -> TrainResult:
    """Load the target, check what there is to learn, and train; every process of a launch calls it.

    Args:
        job: see ``plan_training``.
        raw: what the data settings name.
        folder: of the run, checked by ``check_run_folder``.
        err: gets progress and what the checks found.
        main: whether this is the process that writes.

    Raises:
        SpecdecError: see the parts.
    """
    settings = job.settings
    if main:
        with storage(folder):
            folder.mkdir(parents=True, exist_ok=True)
            stated = {**job.config, "provenance": provenance()}
            write_atomically(folder / CONFIG, yaml.safe_dump(stated, sort_keys=False, allow_unicode=True))
    with enough_memory():
        target = job.load_target()
    if target.tokenizer is None:
        raise InputError("target", target.name, "it has no tokenizer, so its training texts cannot be made")
    with threads(settings.threads, target):
        data = build_examples(raw, job.data, target.tokenizer)
        measured_only = settings.max_steps == 0
        if not data.validation and measured_only:
            remedy = "this chose no text to measure a head on; give a larger share"
            raise InputError("data.validation_share", job.data.validation_share, remedy)
        if not data.validation:
            share = job.data.validation_share
            say(err, f"no text is validated on (data.validation_share={share} chose none), so no accuracy is measured")
        learner, origin = make_learner(job, target, data.training)
        if not measured_only and settings.seed in training_seeds(origin or {}):
            seen = f"the head it starts at saw its texts in the order of seed={settings.seed} too"
            say(err, f"{seen}; with another seed it sees others first")
        if measured_only:
            read = training = data.validation
        else:
            training = texts_to_learn(job, learner, data.training)
            learner.count_in(training)
            read = [*training, *data.validation]
        source = make_source(settings, learner, read, err)
        run_preflight(
            learner,
            training,
            source,
            PreflightSettings(batch_size=settings.batch_size, min_coverage=settings.min_coverage),
            lambda line: say(err, line),
            data=Rendering(data.report.tokenizer_sha256, data.report.chat_template_sha256),
            target=Rendering(tokenizer_fingerprint(target.tokenizer), template_sha256(target.tokenizer)),
        )
        stated = {"data": data.report.record(), "target": stated_target(job, target)}
        with tracked(job.tracking if main else None, learner.kind, job.config, folder) as tracker:
            return train(
                TrainPlan(settings, training_identity(job), {**stated, "started_from": origin}),
                learner,
                training,
                data.validation,
                source,
                own_measure(settings, learner),
                folder,
                console=err,
                tracker=tracker,
            )


def make_learner(
    job: TrainJob, target: Target, examples: Sequence[Example]
) -> tuple[Learner, Mapping[str, Any] | None]:
    """Build the head; its first weights depend on the seed alone, or are those of the head it starts at.

    Returns:
        The learner, and what the head it starts at states about itself.

    Raises:
        InputError: a parameter that only shows with the target to be wrong.
    """
    origin = None
    with own_randomness(target.device, derived_seed(job.settings.seed, "head")):
        try:
            if job.settings.start is None:
                learner = job.make_learner(target, label_counts(examples, target.vocab_size))
            else:
                learner, origin = started(job.make_learner, job.kind, job.settings.start, target, job.config["head"])
            learner.head.to(target.device)
            return learner, origin
        except InputError as error:
            field = error.field if error.field == START else f"head.{error.field}"
            raise InputError(field, error.value, error.remedy) from error


def texts_to_learn(job: TrainJob, learner: Learner, examples: Sequence[Example]) -> list[Example]:
    """Return the training texts as they are learnt: with their prompts if that is asked for, and with repeats.

    Heads are measured, and their vocabularies chosen, by the answers alone; what is repeated are labels of answers that
    the head can draft, or any token for one that drafts what the text holds.
    """
    target = learner.target
    assert target.tokenizer is not None
    data, learnt = job.data, [*examples]
    if data.learn_prompts:
        learnt = with_prompts_learnt(examples, template_opening(target.tokenizer))
    if not data.repeats:
        return learnt
    if learner.context_vocab:
        said: Sequence[int] = range(target.vocab_size)
    else:
        counts = label_counts(examples, target.vocab_size)
        said = [token for token in learner.vocabulary.token_ids.tolist() if counts[token]]
    return learnt + repeated_texts(target.tokenizer, said, data.repeats, data.seed, data.max_tokens)


def make_source(settings: TrainSettings, learner: Learner, examples: Sequence[Example], err: Console) -> FeatureSource:
    """Return what makes the batches; an offline cache is written first."""
    target, layers = learner.target, learner.feature_layers
    if settings.features == "online" or settings.max_steps == 0:  # a measurement reads them once
        return OnlineFeatures(target, layers)
    target.check_states(settings.feature_layers, "feature_layers")
    kept = tuple(sorted({*layers, *settings.feature_layers}))
    folder = prepare_cache(target, kept, examples, err, budget_bytes=settings.feature_bytes)
    return CachedFeatures(folder, layers, target.device)


def stated_target(job: TrainJob, target: Target) -> dict[str, Any]:
    """Return how a head names the target that it was trained for."""
    stated = job.config["target"]
    return {"name": target.name, "model": stated.get("model") or target.name, "revision": stated.get("revision")}


def own_measure(settings: TrainSettings, learner: Learner) -> Callable[[Learner], Mapping[str, float]] | None:
    """Return what measures the head in the engine on the package's own prompts, a few of each kind of task."""
    tokenizer = learner.target.tokenizer
    if not settings.measure_prompts or tokenizer is None:
        return None
    prompts = load_prompts().prompts
    chosen = prompts[:: max(1, len(prompts) // settings.measure_prompts)][: settings.measure_prompts]
    rendered = [render_chat(tokenizer, [{"role": "user", "content": one.turns[0]}]) for one in chosen]
    return measure_on(rendered, settings.measure_tokens, MEASURED_WITH.get(learner.kind, {}))


def label_counts(examples: Sequence[Example], vocab_size: int) -> Tensor:
    """Return how often each token id is a label, ``[vocab]``."""
    labels = [
        token
        for example in examples
        for token, supervised in zip(example.ids, example.supervised, strict=True)
        if supervised
    ]
    return torch.bincount(torch.tensor(labels, dtype=torch.long), minlength=vocab_size)


def _log(folder: Path, err: Console, processes: PartialState) -> AbstractContextManager[None]:
    """Return the context in which the main process writes the log of the run."""
    return log_to(folder / LOG, err) if processes.is_main_process else nullcontext()
