"""One benchmark in several processes: each decodes some of the prompts with every strategy, and the rows meet again.

``accelerate launch`` starts them. Strategies stay interleaved within each process, and a prompt's rows come from one
process, so ratios between strategies stay paired; the counters are those of one process, the times are not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from specdec_lab.bench.files import MOST_PROCESSES, REQUESTS, part_name
from specdec_lab.bench.records import RowKey, key_of, read_rows, write_rows
from specdec_lab.bench.settings import RunPlan
from specdec_lab.errors import InputError, SpecdecError, described

T = TypeVar("T")

PATIENCE = timedelta(days=7)
"""How long a process waits for the others: they meet after all of their prompts, and some finish hours earlier."""


class OtherProcessError(SpecdecError):
    """Another process of the launch could not go on."""


@dataclass(frozen=True)
class Launch:
    """The processes of a launch, seen from one of them; a process alone is a launch of one.

    Attributes:
        rank: of this process, from 0; the first one writes what all share.
        count: of processes that split the prompts. Processes that share one model, by tensor parallelism, decode the
            same prompts: each has a count of 1, and the first one alone is ``main``.
        one_model: whether this process shares its model with others.
    """

    rank: int = 0
    count: int = 1
    one_model: bool = False

    @property
    def main(self) -> bool:
        """Whether this is the first process."""
        return self.rank == 0

    def shared(self, value: T) -> T:
        """Return the first process's value; of processes that share a model, once it is loaded and they have met."""
        values = [value]
        if self.count > 1:
            from accelerate.utils import broadcast_object_list

            broadcast_object_list(values)
        elif self.one_model and torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(values)
        return values[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let all processes leave the block together; where it fails in one, it fails in all.

        Raises:
            OtherProcessError: in the processes that did not fail themselves.
        """
        own: BaseException | None = None
        try:
            yield
        except BaseException as error:
            own = error
        if self.count > 1:
            from accelerate.utils import gather_object

            reasons = gather_object([None if own is None else described(own)])
            failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
            if failed and own is None:
                raise OtherProcessError(f"process {failed[0]} could not go on: {reasons[failed[0]]}")
        if own is not None:
            raise own

    def share(self, plan: RunPlan) -> RunPlan:
        """Return the plan with this process's prompts alone: every n-th, so that kinds of tasks spread."""
        if self.count == 1:
            return plan
        return replace(plan, prompts=replace(plan.prompts, prompts=plan.prompts.prompts[self.rank :: self.count]))

    def requests_path(self, folder: Path) -> Path:
        """Return the file of this process's rows."""
        return folder / (REQUESTS if self.count == 1 else part_name(self.rank))


@contextmanager
def joined(device: object, *, share_model: bool = False, sweep: bool = False) -> Iterator[Launch]:
    """Join the other processes of the launch, if the environment says that there are any.

    Args:
        device: of the target, as the settings name it.
        share_model: whether the target is spread over them, so that all have to run the same forwards.
        sweep: whether this is a job of a sweep.

    Raises:
        InputError: there are too many, or a sweep, or they do not find each other.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Launch()
        return
    if share_model:
        yield Launch(rank=int(os.environ.get("RANK", "0")), one_model=True)
        return
    if sweep:
        remedy = f"under a launcher of {count} processes each would make a sweep of its own; start a launch per job"
        raise InputError("--multirun", True, remedy)
    if count > MOST_PROCESSES:
        raise InputError("--num_processes", count, f"a run folder has room for {MOST_PROCESSES}; start fewer")
    from accelerate import PartialState

    state = PartialState(cpu=on_cpu(device), timeout=PATIENCE)
    try:
        check_all_joined(state.num_processes)
        yield Launch(state.process_index, state.num_processes)
    finally:
        state.destroy_process_group()


def on_cpu(device: object) -> bool:
    """Return whether a target's ``device`` setting means the CPU here; accelerate has to be told before it joins."""
    return device == "cpu" or (device in (None, "auto") and not torch.cuda.is_available())


def check_all_joined(found: int) -> None:
    """Refuse a launch whose processes work alone: each would do everything, and write over the others.

    Args:
        found: processes that accelerate has joined.

    Raises:
        InputError: the launcher started another number.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if found != started:
        remedy = f"accelerate joined {found} of them; give a configuration of conf/accelerate/ that suits the device"
        raise InputError("--num_processes", started, remedy)


def check_enough_prompts(launch: Launch, plan: RunPlan) -> None:
    """Refuse more processes than prompts.

    Raises:
        InputError: a process would have nothing to do.
    """
    if launch.count > len(plan.prompts.prompts):
        remedy = f"there are {len(plan.prompts.prompts)} prompts, and each process needs one; start fewer"
        raise InputError("--num_processes", launch.count, remedy)


def split_rows(folder: Path, plan: RunPlan, launch: Launch, *, resume: bool) -> None:
    """Write each process's file with the rows that are there already; the first process calls it.

    Rows of a launch that was killed are in files of its processes, however many it had, and are taken from there.
    """
    rows = _rows_there(folder) if resume else {}
    if launch.count == 1:
        if any((folder / part_name(rank)).exists() for rank in range(MOST_PROCESSES)):
            write_rows(folder / REQUESTS, rows.values())
            _remove_parts(folder)
        return
    write_rows(folder / REQUESTS, rows.values())
    _remove_parts(folder)
    for rank in range(launch.count):
        own = {prompt.question_id for prompt in Launch(rank, launch.count).share(plan).prompts.prompts}
        write_rows(folder / part_name(rank), [row for key, row in rows.items() if key.question_id in own])


def merge_rows(folder: Path, plan: RunPlan, order: Mapping[str, int], launch: Launch) -> list[dict[str, Any]]:
    """Put the rows of all processes into ``requests.jsonl``, in the order of the prompts, and return them.

    Args:
        order: place of each strategy.
    """
    rows = [row for rank in range(launch.count) for row in read_rows(folder / part_name(rank))]
    places = {prompt.question_id: at for at, prompt in enumerate(plan.prompts.prompts)}
    rows.sort(key=lambda row: (row["repeat"], places[row["question_id"]], row["turn"], order[row["strategy"]]))
    write_rows(folder / REQUESTS, rows)
    _remove_parts(folder)
    return rows


def _rows_there(folder: Path) -> dict[RowKey, dict[str, Any]]:
    found: dict[RowKey, dict[str, Any]] = {}
    for name in (REQUESTS, *(part_name(rank) for rank in range(MOST_PROCESSES))):
        if (folder / name).exists():
            found |= {key_of(row): row for row in read_rows(folder / name)}
    return found


def _remove_parts(folder: Path) -> None:
    for rank in range(MOST_PROCESSES):
        (folder / part_name(rank)).unlink(missing_ok=True)
