"""The training loop on a real small head: the same numbers however it is cut into parts, stopped or resumed."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import debug_launcher
from accelerate.state import AcceleratorState
from linear_learner import LinearLearner, Recorder, make_examples, tiny
from safetensors.torch import load_file
from torch import Tensor

from specdec_lab.distill.batch import Example
from specdec_lab.distill.history import History, averages, read_history, simulated_acceptance_length
from specdec_lab.distill.learner import Learner
from specdec_lab.distill.loop import Measure, NonFiniteLossError, TrainPlan, TrainResult, train
from specdec_lab.distill.train_settings import TrainSettings
from specdec_lab.errors import InputError

EXAMPLES = make_examples(13)
VALIDATION = make_examples(5, seed=1, shift=1000)

SETTINGS: dict[str, Any] = {
    "epochs": 3, "batch_size": 2, "accumulation": 2, "learning_rate": 0.01, "warmup_steps": 3, "weight_decay": 0.1,
    "log_every": 4, "evaluate_every": 5, "save_every": 2, "keep": 3,
}  # fmt: skip
"""Epochs of four steps, the last of which has one example."""


class KilledError(Exception):
    """Stands for a kill: nothing in the loop catches it."""


def run(
    folder: Path,
    *,
    dropout: float = 0.0,
    learner: LinearLearner | None = None,
    examples: Sequence[Example] = EXAMPLES,
    measure: Measure | None = None,
    before: Callable[[int], None] = lambda number: None,
    identity: Mapping[str, Any] | None = None,
    **settings: Any,
) -> tuple[TrainResult, Recorder, LinearLearner]:
    source = Recorder(tiny(), before)
    learner = learner or LinearLearner(tiny(), dropout=dropout)
    plan = TrainPlan(TrainSettings(**{**SETTINGS, **settings}), identity or {})
    return train(plan, learner, examples, VALIDATION, source, measure, folder), source, learner


def kill_at(number: int) -> Callable[[int], None]:
    def kill(batch: int) -> None:
        if batch == number:
            raise KilledError

    return kill


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "head" / "head.safetensors")


def largest_difference(one: Path, other: Path) -> float:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


TIMES = ("seconds", "tokens_per_second", "matmul_share", "attempt")


def timeless(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult, Recorder]:
    """An uninterrupted training with dropout."""
    folder = tmp_path_factory.mktemp("whole")
    result, source, _ = run(folder, dropout=0.3)
    return folder, result, source


@pytest.mark.parametrize("step", [0, 6, 7, 11])
def test_a_killed_training_goes_on_as_if_nothing_had_happened(tmp_path: Path, whole: Any, step: int):
    """Guards TD-04: killed in any epoch, a resumed training repeats the whole one to the last bit.

    Same examples, learning rates, losses and weights; no row of the history is lost or doubled.
    """
    folder, result, source = whole
    assert result.steps == 12
    validations = {0: 0, 6: 3, 7: 3, 11: 6}[step]  # batches of the evaluations at steps 5 and 10
    epochs, rest = divmod(step, 4)
    batches = 7 * epochs + 2 * rest  # the last step of an epoch has a single one
    with pytest.raises(KilledError):
        run(tmp_path, dropout=0.3, before=kill_at(batches + validations))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')
    resumed, after, _ = run(tmp_path, dropout=0.3, resume=True)
    assert not resumed.interrupted
    assert after.keys == source.keys[len(source.keys) - len(after.keys) :]
    assert timeless(resumed.rows) == timeless(result.rows) == timeless(read_history(tmp_path / "metrics.jsonl"))
    assert largest_difference(folder, tmp_path) == 0
    assert {row["attempt"] for row in resumed.rows if row["optimizer_step"] > step} == {1}


def test_a_killed_training_with_two_optimizers_goes_on_likewise(tmp_path: Path):
    """Each optimizer gets the moments of its own weights back."""

    def go(folder: str, **settings: Any) -> TrainResult:
        return run(tmp_path / folder, learner=LinearLearner(tiny(), mixed=True), optimizer="muon", **settings)[0]

    whole = go("whole")
    with pytest.raises(KilledError):
        go("killed", before=kill_at(17))
    resumed = go("killed", resume=True)
    assert timeless(resumed.rows) == timeless(whole.rows)
    assert largest_difference(tmp_path / "whole", tmp_path / "killed") == 0
    saved = load_file(tmp_path / "killed" / "checkpoints" / "step_00000012" / "optimizer.safetensors")
    assert {name.rpartition("/")[2] for name in saved} >= {"momentum_buffer", "exp_avg"}


def test_a_checkpoint_without_a_setting_of_today_goes_on_with_its_default(tmp_path: Path):
    """A training that was begun before there were repeats had none, and could not be told to go on."""
    with pytest.raises(KilledError):
        run(tmp_path, before=kill_at(9))
    with pytest.raises(InputError, match=r"repeats=2 \(was 0\)"):
        run(tmp_path, resume=True, identity={"repeats": 2})
    with pytest.raises(InputError, match=r"head.context_vocab=True \(was False\)"):
        run(tmp_path, resume=True, identity={"head": {"context_vocab": True}})
    with pytest.raises(InputError, match=r"head.transitions=0.6 \(was 0.0\)"):
        run(tmp_path, resume=True, identity={"head": {"transitions": 0.6}})
    head = {"context_vocab": False, "layers": 1, "root": False, "transitions": 0.0}
    today = {"repeats": 0, "head": head}
    result, _, _ = run(tmp_path, resume=True, identity=today)
    assert not result.interrupted


def test_every_epoch_sees_every_example(whole: Any):
    """Guards TD-04 and TD-05: in another order each time, the incomplete last group included."""
    _, _, source = whole
    training = [keys for keys in source.keys if not keys or not keys[0].startswith("q100")]
    flat = [key for keys in training for key in keys]
    epochs = [flat[at : at + 13] for at in range(0, 39, 13)]
    assert len(flat) == 39
    assert all(set(epoch) == {example.key for example in EXAMPLES} for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_training_after_its_step(tmp_path: Path, whole: Any, number: signal.Signals):
    """The step in progress is finished and saved, handlers are put back, and resume gives the whole training."""
    folder, result, _ = whole
    before = signal.getsignal(number)

    def interrupt(batch: int) -> None:
        if batch == 8:  # in the middle of step 5, in the second epoch
            os.kill(os.getpid(), number)

    stopped, _, _ = run(tmp_path, dropout=0.3, before=interrupt)
    assert stopped.interrupted
    assert stopped.head is None
    assert stopped.step == 5
    assert (tmp_path / "checkpoints" / "step_00000005").exists()
    assert signal.getsignal(number) == before
    resumed, _, _ = run(tmp_path, dropout=0.3, resume=True)
    assert timeless(resumed.rows) == timeless(result.rows)
    assert largest_difference(folder, tmp_path) == 0


def test_other_settings_are_refused_by_name(tmp_path: Path):
    """What changes the training is refused with both values; what does not is free."""
    run(tmp_path, epochs=1, identity={"head": {"depths": 2}})
    same: dict[str, Any] = {"epochs": 1, "identity": {"head": {"depths": 2}}, "resume": True}
    for change, words in (
        ({"learning_rate": 0.02}, r"learning_rate=0.02 \(was 0.01\)"),
        ({"epochs": 2}, r"epochs=2 \(was 1\)"),
        ({"accumulation": 3}, r"examples_per_step=6 \(was 4\)"),
        ({"identity": {"head": {"depths": 3}}}, r"head.depths=3 \(was 2\)"),
        ({"examples": EXAMPLES[:-1]}, "examples_sha256="),
    ):
        with pytest.raises(InputError, match=words):
            run(tmp_path, **{**same, **change})
    result, source, _ = run(tmp_path, **{**same, "batch_size": 4, "accumulation": 1, "log_every": 1})
    assert result.step == 4
    assert source.keys == []
    with pytest.raises(InputError, match=r"resume=true, overwrite=true"):
        run(tmp_path, epochs=1)
    with pytest.raises(InputError, match="overwrite"):
        run(tmp_path, epochs=1, resume=True, overwrite=True)
    run(tmp_path, epochs=1, max_steps=1, overwrite=True)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_00000000", "step_00000001"}


def test_saving_is_tried_before_the_first_step(tmp_path: Path):
    """Guards CF-02: what cannot be saved would otherwise show after hours."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KilledError):
        run(tmp_path, before=kill_at(0))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000000"]


# --- one training, cut differently -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult]:
    """Groups of four as one micro-batch."""
    folder = tmp_path_factory.mktemp("undivided")
    return folder, run(folder, batch_size=4, accumulation=1)[0]


def test_accumulation_changes_nothing(tmp_path: Path, undivided: Any):
    """4 x 1 and 2 x 2 equal 1 x 4: labels are counted over the group, not per micro-batch (TD-05)."""
    folder, result = undivided
    for batch_size, accumulation in ((1, 4), (2, 2)):
        other, _, _ = run(tmp_path / str(batch_size), batch_size=batch_size, accumulation=accumulation)
        same_numbers(result.rows, other.rows)
        assert largest_difference(folder, tmp_path / str(batch_size)) < 2e-5


def same_numbers(rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> None:
    for one, other in zip(timeless(rows), timeless(others), strict=True):
        assert one.pop("kind") == other.pop("kind")
        assert one == pytest.approx(other, rel=1e-4)


def forked(folder: Path, settings: Mapping[str, Any], kill: int | None, dropout: float) -> None:
    """Train in one of two forked processes, and leave what it saw in a file."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(1)
    try:
        before = kill_at(kill) if kill is not None else lambda number: None
        _, source, learner = run(folder, dropout=dropout, before=before, **settings)
    except KilledError:
        return
    rank = torch.distributed.get_rank()
    assert all(name.startswith("layers.") for name, _ in learner.head.named_parameters())
    (folder / f"seen_{rank}.json").write_text(json.dumps({"keys": source.keys, "draws": learner.draws}))


@pytest.mark.parametrize("name", ["test_two_processes_equal_one", "test_two_killed_processes_go_on"])
def test_in_a_process_that_may_be_forked(name: str):
    """A fork of a process whose OpenMP threads have worked waits for them for ever, so that each has one of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "forked", f"{__file__}::{name}"]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 passed" in done.stdout


def two_processes(folder: Path, kill: int | None = None, dropout: float = 0.0, **settings: Any) -> None:
    folder.mkdir(exist_ok=True)
    debug_launcher(forked, (folder, settings, kill, dropout), num_processes=2)


@pytest.mark.forked
def test_two_processes_equal_one(tmp_path: Path, undivided: Any):
    """Gradients are averaged over processes and losses summed over labels: same rows, same weights, no ``module.``.

    The last group has one example, so that the second process has nothing but a text without labels there.
    Guards CF-05 and TD-08: it must neither hang nor add anything.
    """
    folder, result = undivided
    two_processes(tmp_path, batch_size=2, accumulation=1)
    same_numbers(result.rows, read_history(tmp_path / "metrics.jsonl"))
    assert largest_difference(folder, tmp_path) < 2e-5
    seen = [json.loads((tmp_path / f"seen_{rank}.json").read_text()) for rank in (0, 1)]
    assert seen[0]["keys"] != seen[1]["keys"]
    assert not {*seen[0]["draws"][:4]} & {*seen[1]["draws"][:4]}  # a process's random numbers are its own
    saved = load_file(tmp_path / "checkpoints" / "step_00000012" / "head.safetensors")
    assert saved.keys() == weights(folder).keys()
    resumed, source, _ = run(tmp_path, batch_size=4, accumulation=1, resume=True)  # by one process
    assert resumed.step == 12
    assert source.keys == []


@pytest.mark.forked
def test_two_killed_processes_go_on(tmp_path: Path):
    """Guards TD-04 with two processes and random numbers of their own, at the end of the second epoch."""
    options: dict[str, Any] = {"batch_size": 1, "accumulation": 2, "dropout": 0.3}
    two_processes(tmp_path / "whole", **options)
    two_processes(tmp_path / "run", kill=16, **options)
    assert not (tmp_path / "run" / "head").exists()
    two_processes(tmp_path / "run", resume=True, **options)
    assert largest_difference(tmp_path / "whole", tmp_path / "run") == 0
    whole_rows, rows = (read_history(tmp_path / name / "metrics.jsonl") for name in ("whole", "run"))
    assert timeless(whole_rows) == timeless(rows)
    assert {row["attempt"] for row in rows} == {0, 1}


# --- what is learnt --------------------------------------------------------------------------------------------------


def test_eight_texts_are_learnt_by_heart(tmp_path: Path):
    """A loop that steps, with gradients of the right sign, brings the loss of eight texts down and the accuracy up."""
    result, _, _ = run(tmp_path, examples=make_examples(8), epochs=60, batch_size=8, accumulation=1, save_every=60)
    training = [row for row in result.rows if row["kind"] == "train"]
    assert training[-1]["loss"] < training[0]["loss"] / 10
    assert training[-1]["accuracy/depth1/top1"] > 0.95


def test_the_target_stays_as_it_is(tmp_path: Path):
    """Guards CF-02: no step, no optimizer state and no place in a checkpoint for frozen weights."""
    before = {name: tensor.clone() for name, tensor in tiny().model.state_dict().items()}
    result, _, learner = run(tmp_path, max_steps=2)
    after = learner.target.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    checkpoint = tmp_path / "checkpoints" / "step_00000002"
    assert {path.name for path in checkpoint.iterdir()} == {
        "head.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
    }  # fmt: skip
    own = sum(parameter.numel() for parameter in learner.head.parameters())
    assert (checkpoint / "head.safetensors").stat().st_size < 4 * own + 10_000
    assert (checkpoint / "optimizer.safetensors").stat().st_size < 8 * own + 10_000
    assert result.head == tmp_path / "head"


def test_texts_without_labels_are_left_out_and_counted(tmp_path: Path):
    """Guards TD-08: they change nothing, and a training on nothing else is refused."""
    silent = [Example(f"silent{at}", (5, 6, 7), (False,) * 3) for at in range(3)]
    result, source, _ = run(tmp_path / "mixed", examples=[*EXAMPLES, *silent], max_steps=4)
    other, _, _ = run(tmp_path / "clean", max_steps=4)
    assert result.skipped == 3
    assert not {key for keys in source.keys for key in keys if key.startswith("silent")}
    without_count = [{**row, "rows_skipped": 0} for row in timeless(result.rows)]
    assert without_count == [{**row, "rows_skipped": 0} for row in timeless(other.rows)]
    assert result.rows[0]["rows_skipped"] == 3
    with pytest.raises(InputError, match="nothing to learn"):
        run(tmp_path / "silent", examples=silent)


def test_a_label_beyond_the_end_teaches_nothing(tmp_path: Path):
    """Guards TD-08: a text whose only label no head predicts gives loss 0 and finite weights."""
    lonely = [Example("lonely", (5, 6), (False, True))]
    run(tmp_path, examples=lonely, max_steps=2, batch_size=1, accumulation=1, weight_decay=0.0)
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path).values())


def test_nan_stops_before_the_weights_change(tmp_path: Path):
    """The sentence names the step, the part of the loss and the examples; the last checkpoint is from before."""
    learner = LinearLearner(tiny(), poison="q4/0/0")
    with pytest.raises(NonFiniteLossError) as stopped:
        run(tmp_path, learner=learner, save_every=1, keep=20)
    sentence = str(stopped.value)
    assert "q4/0/0" in sentence
    assert "parts/head2" in sentence
    assert "parts/head1" not in sentence
    last = max((tmp_path / "checkpoints").iterdir())
    step = int(last.name.removeprefix("step_"))
    assert f"optimizer step {step + 1} " in sentence
    assert step < 4
    saved = load_file(last / "head.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in learner.head.state_dict().items())
    assert all(row["loss"] is not None for row in read_history(tmp_path / "metrics.jsonl"))


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_intervals_count_optimizer_steps(tmp_path: Path):
    """Guards TD-07: logging, evaluating and saving go by steps, whatever the accumulation."""
    measured: list[bool] = []

    def measure(learner: Learner) -> dict[str, float]:
        measured.append(learner.training)
        return {"real_acceptance_length": 1.5}

    result, _, learner = run(
        tmp_path, batch_size=1, accumulation=4, log_every=3, evaluate_every=4, save_every=5, keep=9, measure=measure
    )
    assert [row["optimizer_step"] for row in result.rows if row["kind"] == "train"] == [3, 6, 9, 12]
    assert [row["optimizer_step"] for row in result.rows if row["kind"] == "evaluation"] == [4, 8, 12]
    assert sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir()) == [0, 5, 10, 12]
    assert measured == [False] * 3
    assert learner.training
    assert learner.modes.count(False) == 15  # five validation texts, three times
    assert learner.modes.count(True) == 39
    last = result.last("evaluation")
    assert last is not None
    assert last["real_acceptance_length"] == 1.5
    expected = 1 + last["accuracy/depth1/top1"] * (1 + last["accuracy/depth2/top1"])
    assert last["simulated_acceptance_length"] == pytest.approx(expected)


def test_training_mode_is_back_after_an_evaluation_that_fails(tmp_path: Path):
    """Guards TD-07: a measurement that raises must not leave dropout off for who catches it."""
    learners: list[Learner] = []

    def measure(learner: Learner) -> dict[str, float]:
        learners.append(learner)
        raise KilledError

    with pytest.raises(KilledError):
        run(tmp_path, evaluate_every=1, measure=measure)
    assert learners[0].training


def test_what_is_drawn_in_an_evaluation_moves_no_training(tmp_path: Path, whole: Any):
    """Random numbers of a step depend on the seed, the step and the process; the caller's own are not touched."""
    folder, _, _ = whole

    def measure(learner: Learner) -> dict[str, float]:
        return {"drawn": float(torch.rand(()))}

    torch.manual_seed(3)
    state = torch.get_rng_state()
    _, _, learner = run(tmp_path, dropout=0.3, evaluate_every=2, measure=measure)
    assert torch.equal(torch.get_rng_state(), state)
    drawn = [draw for draw, mode in zip(learner.draws, learner.modes, strict=True) if mode]
    assert len({*drawn}) == 21
    assert largest_difference(folder, tmp_path) == 0


def test_nothing_holds_on_to_a_graph(tmp_path: Path):
    """Guards ML-01: rows hold plain numbers, and no tensor with a graph outlives the training."""

    def with_graph() -> list[Tensor]:
        gc.collect()
        return [one for one in gc.get_objects() if isinstance(one, Tensor) and one.grad_fn is not None]

    before = with_graph()  # of other tests, whose failures or fixtures may hold some
    result, _, _ = run(tmp_path, max_steps=6)
    known = {id(one) for one in before}
    assert not [one for one in with_graph() if id(one) not in known]
    assert all(isinstance(value, int | float | str) for row in result.rows for value in row.values())


def test_bf16_keeps_weights_in_float32(tmp_path: Path):
    """Forwards differ in the third digit; weights and moments are float32 all the same."""
    low, _, learner = run(tmp_path / "bf16", precision="bf16", max_steps=4)
    full, _, _ = run(tmp_path / "fp32", max_steps=4)
    assert {parameter.dtype for parameter in learner.head.parameters()} == {torch.float32}
    assert low.rows[0]["loss"] == pytest.approx(full.rows[0]["loss"], rel=0.02)
    assert low.rows[0]["loss"] != full.rows[0]["loss"]


def test_rows_say_how_fast_and_how_far(whole: Any):
    """Every row has its numbers, the curve is there as a table and a picture, and the head states its making."""
    folder, result, _ = whole
    row = result.last("train")
    assert row is not None
    assert row["epoch"] == 3
    assert row["learning_rate"] == pytest.approx(0.01 * 0.0301, rel=0.01)  # (1 + cos(8 pi / 9)) / 2
    assert row["tokens_per_second"] > 0
    assert 0 < row["matmul_share"] < 1
    assert row["gradient_norm"] > 0
    assert row["parts/head1"] + row["parts/head2"] == pytest.approx(row["loss"], rel=1e-5)
    assert (folder / "training_curve.csv").read_text().count("\n") == 1 + len(result.rows)
    assert (folder / "training_curve.png").stat().st_size > 1000
    stated = json.loads((folder / "head" / "provenance.json").read_text())
    assert stated["optimizer_steps"] == 12
    assert stated["trained_on"]["examples"] == 39
    assert stated["training"]["learning_rate"] == 0.01
    assert stated["trained_on"]["labels"] == 3 * sum(example.labels for example in EXAMPLES)


# --- numbers by hand -------------------------------------------------------------------------------------------------


def test_simulated_acceptance_length_by_hand():
    """Chains as counted where they are; else the product of the accuracies, depth by depth."""
    accuracy = {"accuracy/depth1/top1": 0.5, "accuracy/depth2/top1": 0.4, "accuracy/depth4/top1": 1.0}
    assert simulated_acceptance_length(accuracy) == pytest.approx(1 + 0.5 + 0.2)
    chains = {"accuracy/chain1/right": 0.5, "accuracy/chain2/right": 0.3}
    assert simulated_acceptance_length(accuracy | chains) == pytest.approx(1.8)
    assert simulated_acceptance_length({}) is None


def test_averages_by_hand():
    """Losses per label, hits per position of their own depth, and nothing where nothing was seen."""
    sums = {"loss": 6.0, "labels": 3, "parts/a/b": 1.5, "hits/depth1/top1": 2, "seen/depth1": 4, "hits/depth2/top1": 0}
    expected = {"loss": 2.0, "parts/a/b": 0.5, "accuracy/depth1/top1": 0.5}
    assert averages(sums) == expected
    assert averages({**sums, "seen/depth2": 0, "labels": 0}) == {"accuracy/depth1/top1": 0.5}


def test_history_cuts_what_comes_after_the_checkpoint(tmp_path: Path):
    """A torn line and rows of steps that are done again go; a damaged line in between is refused by its number."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "optimizer_step": 2}\n{"kind": "train", "optimizer_step": 4}\n{"kind"')
    history = History(path, 3)
    history.append({"kind": "train", "optimizer_step": 4, "loss": float("nan")})
    assert [row["optimizer_step"] for row in read_history(path)] == [2, 4]
    assert read_history(path)[1]["loss"] is None
    assert History(path, 0).rows == []
    path.write_text('{"kind": "tra\n{"kind": "train", "optimizer_step": 4}\n')
    with pytest.raises(InputError, match="line 1"):
        read_history(path)
