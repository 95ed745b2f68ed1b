"""The only training loop: every kind of head, one process or several, from the first step or from a checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from rich.console import Console
from torch.distributed.tensor import DTensor

from specdec_lab.bench.console import progress
from specdec_lab.bench.files import storage
from specdec_lab.bench.settings import changed_settings
from specdec_lab.distill.batch import Batch, Example
from specdec_lab.distill.calibrating import calibration_numbers, fitted_lines, lines_of, odds_counts
from specdec_lab.distill.features import FeatureSource, on_device
from specdec_lab.distill.history import (
    History,
    Row,
    Sums,
    accuracy_by_rank,
    added,
    averages,
    last_evaluation,
    outcome_sums,
    simulated_acceptance_length,
    write_curve,
)
from specdec_lab.distill.learner import Learner
from specdec_lab.distill.optimizers import make_optimizers
from specdec_lab.distill.peak import matmul_peak
from specdec_lab.distill.schedule import (
    derived_seed,
    epoch_order,
    groups_in_epoch,
    learning_rate,
    planned_steps,
    rank_slices,
    step_examples,
)
from specdec_lab.distill.stopping_request import stop_request
from specdec_lab.distill.train_files import CHECKPOINTS, EXPORT, METRICS, check_free, clear_folder, replaced_folder
from specdec_lab.distill.train_settings import TrainSettings
from specdec_lab.distill.training_state import (
    head_tensors,
    last_checkpoint,
    load_head_tensors,
    load_optimizer_tensors,
    make_whole,
    optimizer_tensors,
    remove_later,
    trained_parameters,
    write_checkpoint,
)
from specdec_lab.errors import InputError, SpecdecError, listed
from specdec_lab.heads.calibration import CALIBRATION
from specdec_lab.provenance import provenance

log = logging.getLogger(__name__)


class NonFiniteLossError(SpecdecError):
    """A loss or a gradient became NaN or infinite; the weights are those from before the step."""


class Tracker(Protocol):
    """Is told every row of ``metrics.jsonl`` as numbers."""

    def log(self, numbers: Mapping[str, float]) -> None:
        """Note the numbers of one row; ``optimizer_step`` is among them."""


EXAMPLES = "examples_sha256"
"""Name, among the settings of a training, of the fingerprint of what it learns."""

ADDED_LATER: Mapping[str, Any] = {"optimizer": "adamw", "repeats": 0}
"""Settings that older checkpoints do not state, with what they were then."""

ADDED_TO_HEADS_LATER: Mapping[str, Any] = {
    "context_vocab": False,
    "layers": 1,
    "root": False,
    "transitions": 0.0,
}
"""Likewise, of a head."""

Measure = Callable[[Learner], Mapping[str, float]]
"""Runs the head as it is in the engine; returns numbers, ``real_acceptance_length`` among them."""


@dataclass(frozen=True)
class TrainPlan:
    """What is to be done.

    Attributes:
        settings: of the training.
        identity: plain values that must be the same where a training goes on, besides settings and examples.
        provenance: plain values that the exported head states, besides that.
    """

    settings: TrainSettings
    identity: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainResult:
    """How a training ended.

    Attributes:
        step: optimizer steps done.
        steps: optimizer steps planned.
        rows: of ``metrics.jsonl``.
        head: folder of the exported head; ``None`` where the training was interrupted.
        skipped: examples without a label, which were left out.
    """

    step: int
    steps: int
    rows: Sequence[Row]
    head: Path | None
    skipped: int

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the training before its last step."""
        return self.step < self.steps

    def last(self, kind: str) -> Row | None:
        """Return the last row of a kind."""
        return next((row for row in reversed(self.rows) if row["kind"] == kind), None)


def train(
    plan: TrainPlan,
    learner: Learner,
    examples: Sequence[Example],
    validation: Sequence[Example],
    source: FeatureSource,
    measure: Measure | None,
    folder: Path,
    *,
    console: Console | None = None,
    tracker: Tracker | None = None,
) -> TrainResult:
    """Train a head, from the first step or from the last checkpoint in the folder (``resume``).

    Every process of a launch calls it with the same arguments.

    Args:
        plan: settings and identity.
        learner: the head with its loss; its weights are those of the first step.
        examples: to learn from; those without a label are left out and counted.
        validation: to evaluate on; may be empty.
        source: makes batches.
        measure: called on the main process at each evaluation; ``None`` for none.
        folder: of the run: ``metrics.jsonl``, ``checkpoints/``, ``head/`` and the training curve are written there.
        console: for the progress bar; ``None`` shows nothing.
        tracker: see ``Tracker``; asked on the main process alone.

    Raises:
        InputError: nothing to learn from, or ``resume`` finds another training or no whole checkpoint.
        NonFiniteLossError: names the step, the parts of the loss and the examples.
        StorageError: the folder cannot be written.
    """
    check_free(folder, resume=plan.settings.resume, overwrite=plan.settings.overwrite)
    with stop_request() as stop_asked:
        training = _Training(plan, learner, examples, validation, source, measure, folder, tracker)
        return training.run(console or Console(quiet=True), stop_asked)


class _Training:
    """A training in progress: what ``train`` was given, the wrapped head, and how far it is."""

    def __init__(
        self,
        plan: TrainPlan,
        learner: Learner,
        examples: Sequence[Example],
        validation: Sequence[Example],
        source: FeatureSource,
        measure: Measure | None,
        folder: Path,
        tracker: Tracker | None,
    ) -> None:
        self.plan, self.settings = plan, plan.settings
        self.learner, self.source, self.measure = learner, source, measure
        self.folder, self.tracker = folder, tracker
        self.rows = [example for example in examples if example.labels]
        self.skipped = len(examples) - len(self.rows)
        if not self.rows:
            remedy = "no example has a token that the target wrote, so there is nothing to learn; see the data settings"
            raise InputError("data", len(examples), remedy)
        self.validation = [example for example in validation if example.labels]
        self.lengths = [len(example.ids) for example in self.rows]
        self.accelerator = Accelerator(cpu=learner.target.device.type == "cpu", mixed_precision="no")
        self.processes, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        self.main = self.accelerator.is_main_process
        self.group_size = self.settings.group_size(self.processes)
        self.steps = planned_steps(len(self.rows), self.group_size, self.settings.epochs, self.settings.max_steps)
        self.identity = {
            **plan.identity,
            **self.settings.fixed(self.processes),
            EXAMPLES: examples_sha256(self.rows),
        }
        self.sharded = self.accelerator.distributed_type == DistributedType.FSDP
        if self.sharded and not learner.shardable:
            raise InputError("head", type(learner).__name__, "its parameters cannot be sharded; launch with ddp.yaml")
        if self.sharded and self.settings.optimizer == "muon":
            raise InputError(
                "optimizer", "muon", "it needs whole matrices, not shards; launch with ddp.yaml, or use adamw"
            )
        self.optimizers = make_optimizers(trained_parameters(learner.head), self.settings, learner.tables())
        self.model = self.accelerator.prepare(learner, *self.optimizers)[0]
        self.parameters = trained_parameters(learner.head)  # sharding replaces them
        self.size = sum(parameter.numel() for parameter in self.parameters.values())
        self.order: tuple[int, tuple[int, ...]] | None = None
        self.history: History | None = None
        self.pending: Sums = {}
        self.counters: Sums = {}
        self.attempt, self.last_loss = 0, math.nan

    # --- from start to end --------------------------------------------------------------------------------------------

    def run(self, console: Console, stop_asked: Callable[[], bool]) -> TrainResult:
        """Do every step that is left, then export the head; without any it is only evaluated."""
        step = self.restore()
        if not self.steps:
            self.log_evaluation(step)
        peak = matmul_peak(self.accelerator.device, self.compute_dtype)
        self.peak = sum(gather_object([peak]))
        self.model.train()
        shown = console if self.main else Console(quiet=True)
        with progress(shown, self.steps, step, "steps") as report:
            while step < self.steps:
                stop = self.step(step, stop_asked)
                step += 1
                self.after(step, stop)
                report(f"loss {self.last_loss:.4g}")
                if stop:
                    break
        interrupted = step < self.steps
        head = None if interrupted else self.export(step)
        rows: Sequence[Row] = ()
        if self.history is not None:
            rows = self.history.rows
            with storage(self.folder):
                write_curve(self.folder, rows)
        return TrainResult(step, self.steps, rows, head, self.skipped)

    def restore(self) -> int:
        """Go to the last checkpoint, or write the first one, and return the steps done.

        The checkpoint of step 0 goes through all of the saving before hours have been spent.
        """
        checkpoints = self.folder / CHECKPOINTS
        found = last_checkpoint(checkpoints) if self.settings.resume else None
        step = 0 if found is None else int(found.state["step"])
        if found is not None:
            refuse_other_settings(found.state["identity"], self.identity)
            load_head_tensors(self.learner.head, found.head)
            load_optimizer_tensors(self.optimizers, self.parameters, found.optimizer)
            self.attempt = int(found.state["attempt"]) + 1
            if self.main:
                self.pending, self.counters = dict(found.state["pending"]), dict(found.state["counters"])
        self.accelerator.wait_for_everyone()  # before files change that others are still reading
        if self.main:
            with storage(self.folder):
                if self.settings.overwrite:
                    clear_folder(self.folder)
                self.folder.mkdir(parents=True, exist_ok=True)
                remove_later(checkpoints, step)
                self.history = History(self.folder / METRICS, step)
        if found is None:
            self.save(0)
        return step

    def after(self, step: int, stop: bool) -> None:
        """Do what is due when so many steps are done; the checkpoint comes last, and so holds all of it."""
        last, settings = step == self.steps, self.settings
        if step % settings.log_every == 0 or last:
            self.log_training(step)
        if last or (settings.evaluate_every is not None and step % settings.evaluate_every == 0):
            self.log_evaluation(step)
        if step % settings.save_every == 0 or last or stop:
            self.save(step)

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self, step: int, stop_asked: Callable[[], bool]) -> bool:
        """Do one optimizer step; return whether any process was asked to stop.

        The loss is the sum over the group's labels divided by their number in the whole group, so that it does not
        matter into how many micro-batches and processes the group is cut.

        Args:
            step: counted from 0.
        """
        start = time.perf_counter()
        group = self.group(step)
        labels = sum(self.rows[index].labels for index in group)
        slices = rank_slices(group, self.lengths, self.settings.batch_size, self.processes, self.rank)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        sums: list[Sums] = []
        with own_randomness(self.accelerator.device, derived_seed(self.settings.seed, "step", step, self.rank)):
            for at, indices in enumerate(slices):
                batch = self.batch([self.rows[index] for index in indices], filler=self.rows[group[0]])
                with self.synchronised(at == len(slices) - 1):
                    with self.autocast():
                        outcome = self.model(batch)
                    self.backward(outcome.loss * (self.processes / labels))  # several processes: gradients are averaged
                sums.append(outcome_sums(outcome, batch))
        norm = self.clip()
        faults = self.faults(sums, slices)
        bad, stop = self.any_process(bool(faults) or not math.isfinite(norm), stop_asked())
        if bad:
            raise NonFiniteLossError(self.describe(step, faults))
        rate = self.learning_rate(step)
        for optimizer in self.optimizers:
            for options in optimizer.param_groups:
                options["lr"] = rate
            optimizer.step()
        facts: Sums = {"steps": 1, "gradient_norm": norm, "seconds": time.perf_counter() - start} if self.main else {}
        self.pending = added(self.pending, *sums, facts)
        self.last_loss = sum(one["loss"] for one in sums) / max(1, sum(one["labels"] for one in sums))
        return stop

    def group(self, step: int) -> tuple[int, ...]:
        """Return the indices of the examples that a step takes over all processes."""
        epoch = step // groups_in_epoch(len(self.rows), self.group_size)
        if self.order is None or self.order[0] != epoch:
            self.order = (epoch, epoch_order(len(self.rows), self.settings.seed, epoch))
        return step_examples(self.order[1], step, self.group_size)

    def batch(self, examples: Sequence[Example], filler: Example) -> Batch:
        """Return a micro-batch on the device; an empty one holds a text without labels, to keep processes in step."""
        if not examples:
            examples = [replace(filler, supervised=(False,) * len(filler.ids))]
        return on_device(self.source.batch(examples), self.accelerator.device)

    def backward(self, loss: torch.Tensor) -> None:
        """Add a loss's gradients; a loss that does not depend on the head adds none."""
        if self.processes > 1 and not self.sharded:  # they wait for a gradient of every parameter, be it zero
            loss = loss + sum((parameter * 0).sum() for parameter in self.parameters.values())
        if loss.requires_grad:
            self.accelerator.backward(loss)

    def clip(self) -> float:
        """Scale the gradients down to the largest norm allowed, and return the norm before that."""
        held = [parameter for parameter in self.parameters.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in held if parameter.grad is not None])
        size = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if self.settings.clip is not None and math.isfinite(size):  # else the gradients stay as they are, to be named
            torch.nn.utils.clip_grads_with_norm_(held, self.settings.clip, norm)
        return size

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        s = self.settings
        return learning_rate(step, self.steps, s.learning_rate, s.schedule, s.warmup_steps, s.floor)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward: bf16 where the settings say so; weights stay float32."""
        device = self.accelerator.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.settings.precision == "bf16")

    @property
    def compute_dtype(self) -> torch.dtype:
        """What matrices are multiplied in."""
        return torch.bfloat16 if self.settings.precision == "bf16" else torch.float32

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch: processes exchange gradients at a step's last one alone."""
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    # --- faults -------------------------------------------------------------------------------------------------------

    def faults(self, sums: Sequence[Sums], slices: Sequence[Sequence[int]]) -> list[str]:
        """Return a sentence part for each micro-batch whose loss is not finite."""
        found: list[str] = []
        for one, indices in zip(sums, slices, strict=True):
            names = [name for name, value in one.items() if not math.isfinite(value)]
            if names:
                keys = listed([self.rows[index].key for index in indices], most=8)
                found.append(f"{', '.join(names)} over the examples {keys}")
        return found

    def describe(self, step: int, faults: Sequence[str]) -> str:
        """Return what went wrong in a step, over all processes."""
        everywhere = gather_object(list(faults))
        where = "; ".join(everywhere)
        if not everywhere:
            names = [
                name
                for name, parameter in self.parameters.items()
                if parameter.grad is not None and not parameter.grad.isfinite().all()
            ]
            keys = [self.rows[index].key for index in self.group(step)]
            where = f"the gradient of {listed(names, most=3)} over the examples {listed(keys, most=8)}"
        return (
            f"{self.learner.kind}: optimizer step {step + 1} is not finite ({where}); the weights are those from "
            "before it; lower learning_rate, clip harder or look at these examples"
        )

    def any_process(self, *flags: bool) -> list[bool]:
        """Return, flag by flag, whether it is set in any process."""
        if self.processes == 1:
            return list(flags)
        mine = torch.tensor([float(flag) for flag in flags], device=self.accelerator.device)
        return [value > 0 for value in self.accelerator.reduce(mine, "sum").tolist()]  # pyright: ignore

    # --- what is written ----------------------------------------------------------------------------------------------

    def merged(self, sums: Sums) -> Sums:
        """Return the sums over all processes on the main one, and nothing on the others."""
        if self.processes == 1:
            return sums
        everywhere = gather_object([sums])
        return added(*everywhere) if self.main else {}

    def log_training(self, step: int) -> None:
        """Write the row of the steps since the last one."""
        sums, self.pending = self.merged(self.pending), {}
        if not self.main:
            return
        self.counters = added(self.counters, {name: sums[name] for name in ("tokens", "labels", "examples", "seconds")})
        seconds = max(sums["seconds"], 1e-9)
        self.write(
            "train",
            step,
            {
                **averages(sums),
                "learning_rate": self.learning_rate(step - 1),
                "gradient_norm": sums["gradient_norm"] / sums["steps"],
                "tokens_per_second": sums["tokens"] / seconds,
                "matmul_share": 6 * self.size * sums["tokens"] / seconds / self.peak,
                "seconds": sums["seconds"],
                "labels": sums["labels"],
                "rows_skipped": self.skipped,
            },
        )

    def log_evaluation(self, step: int) -> None:
        """Write the row of an evaluation."""
        numbers = self.evaluate()
        if self.main and numbers:
            self.write("evaluation", step, numbers)

    def evaluate(self) -> dict[str, float]:
        """Return validation averages, simulated acceptance length and what ``measure`` finds, on the main process.

        The head is in evaluation mode meanwhile, and back in its mode before whatever happens.
        """
        before = self.model.training
        self.model.eval()
        try:
            with (
                torch.no_grad(),
                own_randomness(self.accelerator.device, derived_seed(self.settings.seed, "evaluation")),
            ):
                sums = self.merged(added(*self.validation_sums()))
                numbers = averages(sums) | calibration_numbers(fitted_lines(sums))
                length = simulated_acceptance_length(numbers)
                if length is not None:
                    numbers["simulated_acceptance_length"] = length
                if self.measure is not None and self.main and not self.sharded:
                    numbers |= {name: float(value) for name, value in self.measure(self.learner).items()}
            self.accelerator.wait_for_everyone()
            return numbers
        finally:
            self.model.train(before)

    def validation_sums(self) -> list[Sums]:
        """Return the sums of this process's share of the validation examples."""
        lengths = [len(example.ids) for example in self.validation]
        slices = rank_slices(range(len(self.validation)), lengths, self.settings.batch_size, self.processes, self.rank)
        sums: list[Sums] = []
        for indices in slices:
            batch = self.batch([self.validation[index] for index in indices], filler=self.validation[0])
            with self.autocast():
                outcome = self.learner(batch)
            sums.append(outcome_sums(outcome, batch) | odds_counts(outcome.ranked))
        return sums

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Append a row to ``metrics.jsonl`` and tell the tracker."""
        epoch = step / groups_in_epoch(len(self.rows), self.group_size)
        facts = {"optimizer_step": step, "epoch": epoch, "attempt": self.attempt}
        assert self.history is not None
        with storage(self.folder):
            self.history.append({"kind": kind, **facts, **numbers})
        if self.tracker is not None:
            self.tracker.log(facts | {f"{kind}/{name}": float(value) for name, value in numbers.items()})

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        head = head_tensors(self.learner.head)
        optimizer = optimizer_tensors(self.optimizers, self.parameters)
        self.pending = self.merged(self.pending)
        if self.main:
            state = {
                "step": step,
                "epoch": step / groups_in_epoch(len(self.rows), self.group_size),
                "attempt": self.attempt,
                "counters": self.counters,
                "pending": self.pending,
                "identity": self.identity,
            }
            with storage(self.folder):
                write_checkpoint(self.folder / CHECKPOINTS, head, optimizer, state, self.settings.keep)
        self.accelerator.wait_for_everyone()

    def measured(self) -> dict[str, Any]:
        """Return what the last evaluation found, for who uses the head; nothing without one."""
        rows = () if self.history is None else self.history.rows
        last = last_evaluation(rows)
        if last is None:
            return {}
        return {
            "evaluation": dict(last),
            "accuracy_by_rank": accuracy_by_rank(last),
            CALIBRATION: lines_of(last),
        }

    def export(self, step: int) -> Path:
        """Write the head as its strategy loads it, and return the folder."""
        folder = self.folder / EXPORT
        make_whole(self.learner.head)
        if self.main:
            facts = {
                "optimizer_steps": step,
                "trained_on": {
                    name: self.counters.get(name, 0) for name in ("examples", "labels", "tokens", "seconds")
                },
                "training": self.identity,
                **self.measured(),
                **self.plan.provenance,
                **provenance(),
            }
            with storage(self.folder), replaced_folder(folder) as new:
                self.learner.export(new, facts)
        self.accelerator.wait_for_everyone()
        return folder


def examples_sha256(examples: Sequence[Example]) -> str:
    """Return a hash of what is learnt from: keys, ids and marks, in order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.key, example.ids, example.supervised)).encode())
    return digest.hexdigest()


@contextmanager
def own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's random numbers for a while; what is drawn outside is not touched by that."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def refuse_other_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with a training that was begun with other settings.

    Raises:
        InputError: names those that differ.
    """
    changes = changed_settings(completed(before), completed(now))
    if changes:
        remedy = f"the training had other settings: {', '.join(changes)}; give the same or another folder"
        raise InputError("resume", True, remedy)


def completed(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a training as JSON gives them back, with those that came to be since it was begun."""
    head = {**ADDED_TO_HEADS_LATER, **identity.get("head", {})}
    return json.loads(json.dumps({**ADDED_LATER, **identity, "head": head}))
