"""The command line of a training as a user meets it: settings, exit codes, signals, files, one process and two."""

from __future__ import annotations

import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors.torch import load_file

from specdec_lab import conf
from specdec_lab.distill.batch import Example
from specdec_lab.distill.train_command import plan_training, texts_to_learn
from specdec_lab.distill.train_settings import TrainSettings
from specdec_lab.errors import InputError
from specdec_lab.heads.facts import training_seeds

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}

TINY = (
    "target=tiny", "target.device=cpu", "head=medusa", "head.heads=2", "head.draft_vocab=null", "batch_size=4",
    "data.prompts=[p.jsonl]", "data.responses=[r.jsonl]", "data.validation_share=0.2", "epochs=2", "warmup_steps=2",
    "log_every=2", "evaluate_every=3", "save_every=2", "hydra.run.dir=run",
)  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prompts, and answers of random ids in the shape of a plain file of responses."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses = [], []
    for number in range(20):
        ids = torch.randint(5, 300, (12,), generator=generator).tolist()
        prompts.append({"question_id": number, "category": "talk", "turns": [f"question {number}"]})
        responses.append({"question_id": number, "response_ids": [*ids, 2], "finished": True})
    for name, rows in (("p.jsonl", prompts), ("r.jsonl", responses)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def command(
    data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Return ``(overrides) -> (exit code, stdout, stderr)``: the script from its first line, in this process."""

    def call(*overrides: str) -> tuple[int, str, str]:
        monkeypatch.chdir(data)
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *TINY, *overrides])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        shown = capfd.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return call


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.fixture
def _hydra() -> Iterator[None]:
    with initialize_config_module("specdec_lab.conf", version_base="1.3"):
        yield


def composed(*overrides: str) -> Any:
    config = compose("train", overrides=["target=tiny", "head=medusa", "data.responses=[r.jsonl]", *overrides])
    return OmegaConf.to_container(config, resolve=True)


@pytest.mark.usefixtures("_hydra")
def test_the_file_states_every_setting_with_its_default():
    """A file and its model cannot drift apart."""
    plain = composed()
    assert TrainSettings(**{name: plain[name] for name in TrainSettings.model_fields}) == TrainSettings()


@pytest.mark.usefixtures("_hydra")
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("learning_rate=0", "learning_rate=0: .*greater than 0"),
        ("learning_rate=fast", "learning_rate='fast': .*number"),
        ("learning_rate=nan", "learning_rate=nan: "),
        ("schedule=sine", "schedule='sine': .*'cosine'"),
        ("betas=[0.9]", "betas.1=None: "),
        ("betas=[0.9,1]", "betas.1=1: .*less than 1"),
        ("floor=2", "floor=2: "),
        ("clip=0", "clip=0: "),
        ("precision=fp16", "precision='fp16': "),
        ("batch_size=0", "batch_size=0: "),
        ("max_steps=1.5", "max_steps=1.5: .*integer"),
        ("warmup_steps=-1", "warmup_steps=-1: "),
        ("save_every=null", "save_every=None: "),
        ("keep=0", "keep=0: "),
        ("features=sometimes", "features='sometimes': "),
        ("+colour=red", "colour='red': "),
        ("head.heads=0", "head.heads=0: "),
        ("+head.size=1", "head.size=1: there is no field"),
        ("head._target_=os.getcwd", "head._target_='os.getcwd': this is no Learner"),
        ("data.max_tokens=0", "data.max_tokens=0: "),
        ("target.dtype=int3", "target.dtype='int3': "),
        ("head=5", "head=5: this is a group"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_loaded(override: str, sentence: str):
    """One sentence names the field, the value and the remedy."""
    plain = composed() if override.startswith("head=") else composed(override)
    if override.startswith("head="):
        plain["head"] = 5
    with pytest.raises(InputError, match=sentence) as refused:
        plan_training(plain)
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("_hydra")
def test_learning_rates_are_numbers_however_spelled():
    """Guards CL-02: ``1e-4`` is text to a plain YAML reader and a number to Hydra's; here it is a number always."""
    for text in ("1e-4", "1.0e-4", "1E-4", "0.0001"):
        assert plan_training(composed(f"learning_rate={text}")).settings.learning_rate == 1e-4
        from_file = {**composed(), **yaml.safe_load(f"learning_rate: {text}")}
        assert plan_training(from_file).settings.learning_rate == 1e-4


@pytest.mark.parametrize(
    "path", sorted((Path(str(conf.__path__[0])) / "accelerate").iterdir()), ids=lambda path: path.stem
)
def test_launch_files_are_what_accelerate_reads(path: Path):
    """No key that the launcher does not know, and no ``MULTI_CPU``, with which it starts one process only."""
    found: Any = load_config_from_file(str(path))
    assert found.distributed_type != "MULTI_CPU"
    assert found.num_processes == (2 if path.stem in ("cpu2", "ddp", "fsdp2") else 1)
    assert found.use_cpu == path.stem.startswith("cpu")


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_training_leaves_a_head_and_its_history(command, data: Path):
    """From files to an exported head, with the checks before it, one W&B run beside it, and nothing else."""
    code, out, err = command("tracking=wandb", "tracking.mode=offline", "learning_rate=1e-2")
    assert code == 0, err
    run = data / "run"
    assert "head: " in out
    assert "labels" in err
    assert "Traceback" not in out + err
    logged = {"train.log"}  # there if a library has something to say, as matplotlib does when it first looks for fonts
    assert {path.name for path in run.iterdir()} - logged == {
        "config.yaml", "metrics.jsonl", "checkpoints", "head", "wandb", "training_curve.csv", "training_curve.png"
    }  # fmt: skip
    rows = rows_of(run)
    last = [row for row in rows if row["kind"] == "train"][-1]
    assert last["epoch"] == 2
    assert {row["optimizer_step"] for row in rows if row["kind"] == "evaluation"} >= {3}
    assert list((run / "head").iterdir())
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["learning_rate"] == 0.01
    assert config["head"]["heads"] == 2
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1


def test_prompts_are_learnt_on_request(command, data: Path):
    """The same texts have more labels, the checks before the first step see them, and the head states it."""
    texts, heads = {}, {}
    for learn in ("false", "true"):
        code, _, texts[learn] = command(f"data.learn_prompts={learn}", "epochs=1", "overwrite=true")
        assert code == 0, texts[learn]
        heads[learn] = json.loads((data / "run" / "head" / "config.json").read_text())["specdec_lab"]["facts"]
    assert heads["true"]["trained_on"]["labels"] > heads["false"]["trained_on"]["labels"]
    assert heads["true"]["trained_on"]["tokens"] == heads["false"]["trained_on"]["tokens"]
    marks = [next(line for line in text.splitlines() if line.startswith("marks: ")) for text in texts.values()]
    assert marks[0] != marks[1]
    assert [facts["training"]["learn_prompts"] for facts in heads.values()] == [False, True]
    code, _, err = command("data.learn_prompts=false", "epochs=1", "resume=true")
    assert code == 1
    assert "learn_prompts" in err


def test_repeats_are_learnt_on_request(command, data: Path, monkeypatch: pytest.MonkeyPatch):
    """They are labels besides the answers, the head says how many there were, and a training goes on with as many."""
    heads = {}
    for count in (0, 3):
        code, _, err = command(f"data.repeats={count}", "epochs=1", "overwrite=true")
        assert code == 0, err
        heads[count] = json.loads((data / "run" / "head" / "config.json").read_text())["specdec_lab"]["facts"]
    assert heads[3]["trained_on"]["labels"] > heads[0]["trained_on"]["labels"]
    assert [facts["training"]["repeats"] for facts in heads.values()] == [0, 3]
    assert heads[3]["data"] == heads[0]["data"]
    monkeypatch.setattr(
        "specdec_lab.distill.train_command.read_data", None
    )  # refused before anything is read or loaded
    code, _, err = command("data.repeats=0", "epochs=1", "resume=true")
    assert code == 1
    assert "repeats=0 (was 3)" in err.replace("\n", " ")


@pytest.mark.parametrize("kind", ["medusa", "medusa2"])
def test_pairs_of_the_training_texts_come_with_the_head(kind: str, command, data: Path):
    """A head that was trained beside pairs needs them; one that goes on needs the same weight."""
    code, _, err = command(f"head={kind}", "head.heads=2", "head.draft_vocab=null", "head.transitions=0.6", "epochs=1")
    assert code == 0, err
    head = data / "run" / "head"
    tensors = load_file(head / "medusa_lm_head.safetensors")
    rows = [json.loads(line) for line in (data / "r.jsonl").read_text().splitlines()]
    known = {pair for row in rows for pair in itertools.pairwise(row["response_ids"])}
    pairs = set(zip(tensors["transitions.previous"].tolist(), tensors["transitions.following"].tolist(), strict=True))
    assert len(pairs & known) > 0.5 * len(known)  # some questions are validated on
    assert json.loads((head / "config.json").read_text())["specdec_lab"]["transitions"] == 0.6
    code, _, err = command(
        f"head={kind}", "head.heads=2", "head.draft_vocab=null", f"start={head}", "hydra.run.dir=more"
    )
    assert code == 1
    assert "it was trained with head.transitions=0.6, so give these" in err.replace("\n", " ")


@pytest.mark.usefixtures("_hydra")
@pytest.mark.parametrize("context", [False, True])
def test_repeats_hold_what_the_head_can_draft(context: bool, data: Path, monkeypatch: pytest.MonkeyPatch):
    """Labels that cannot be drafted teach nothing; a head that drafts what its text holds can draft any of them."""
    monkeypatch.chdir(data)
    job = plan_training(
        composed("head=eagle", "head.draft_vocab=9", f"head.context_vocab={context}", "data.repeats=20")
    )
    target = job.load_target()
    ids = tuple(range(40, 60))
    learner = job.make_learner(target, torch.bincount(torch.tensor(ids), minlength=target.vocab_size))
    texts = texts_to_learn(job, learner, [Example("1/0/0", ids, (True,) * len(ids))])[1:]
    said = [token for text in texts for token, mark in zip(text.ids, text.supervised, strict=True) if mark]
    inside = float((learner.vocabulary.draft_ids(torch.tensor(said)) >= 0).double().mean())
    assert len(texts) == 20
    assert inside < 0.5 if context else inside > 0.5  # some merge with others into tokens of neither kind


def test_a_head_that_goes_on_is_told_of_its_order(command, data: Path):
    """Each training began with the same texts again: four hundred more steps made a head no better."""
    code, _, err = command("epochs=1")
    assert code == 0, err
    for seed, told in ((0, True), (1, False)):
        code, _, err = command("epochs=1", "start=run/head", f"seed={seed}", f"hydra.run.dir=again{seed}")
        assert code == 0, err
        assert ("saw its texts in the order of seed=0 too" in err) == told
    facts = {"training": {"seed": 2}, "started_from": {"training": {"seed": 0}, "started_from": None}}
    assert training_seeds(facts) == {0, 2}
    assert training_seeds({}) == set()


def test_a_recipe_for_a_deeper_target_names_the_layers(command):
    """It was an IndexError of a tuple, after the target had been loaded."""
    code, out, err = command("features=offline", "feature_layers=[2,15]")
    assert code == 1
    assert "error: feature_layers=[15]: " in err
    assert "Traceback" not in out + err


def test_mistakes_are_one_sentence(command, data: Path):
    """Refused with exit code 1, before a run folder has anything in it."""
    for overrides, words in (
        (["data.responses=[absent.jsonl]"], ["data.responses", "absent.jsonl"]),
        (["resume=true", "overwrite=true"], ["overwrite=True"]),
        (["learning_rate=0"], ["learning_rate=0"]),
        (["head=meduza"], ["meduza", "medusa"]),
        (["min_coverage=2"], ["min_coverage=2"]),
    ):
        code, out, err = command(*overrides)
        assert code == 1, err
        assert "Traceback" not in out + err
        last = err.strip().splitlines()[-1]
        assert last.startswith("error: ")
        assert all(word in last for word in words), err
        assert not list((data / "run").glob("*"))
    (data / "run").mkdir(exist_ok=True)
    (data / "run" / "notes.txt").write_text("mine")
    code, _, err = command()
    assert code == 1
    assert "notes.txt" in err
    code, _, err = command("resume=true")
    assert code == 1
    assert "holds no config.yaml" in err
    assert [path.name for path in (data / "run").iterdir()] == ["notes.txt"]


def interrupted(data: Path, number: signal.Signals, *overrides: str) -> tuple[int, str]:
    """Start the script in a process of its own and send it a signal once it has saved its fourth step."""
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *TINY, *overrides], cwd=data, env=ENVIRONMENT, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 120
        while not (data / "run" / "checkpoints" / "step_00000004").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    return process.returncode, err


LONG = ("epochs=40", "keep=100", "evaluate_every=null")


def test_ctrl_c_and_kill_are_gone_on_from(command, data: Path):
    """Exit code 130 with one sentence that says how to go on; after kill -9, and then to the end, no row is doubled."""
    code, err = interrupted(data, signal.SIGINT, *LONG)
    assert code == 130, err
    assert "Traceback" not in err
    assert "resume=true" in err.strip().splitlines()[-1]
    stopped = max(int(path.name[5:]) for path in (data / "run" / "checkpoints").iterdir())
    code, err = interrupted(data, signal.SIGKILL, *LONG, "resume=true")
    assert code == -signal.SIGKILL
    code, _, err = command(*LONG, "resume=true")
    assert code == 0, err
    steps = [row["optimizer_step"] for row in rows_of(data / "run") if row["kind"] == "train"]
    assert steps == sorted(set(steps))
    assert steps[-1] > stopped
    assert {row["attempt"] for row in rows_of(data / "run")} >= {0, 1}


def test_a_training_begins_where_another_ended(command, data: Path):
    """The first loss is about the other's last one, and the head says where it comes from."""
    code, _, err = command("epochs=30", "evaluate_every=null", "learning_rate=1e-2")
    assert code == 0, err
    ended = [row["loss"] for row in rows_of(data / "run") if row["kind"] == "train"]
    assert ended[-1] < 0.97 * ended[0]
    code, _, err = command("start=run/head", "hydra.run.dir=next", "learning_rate=1e-6", "head.draft_vocab=null")
    assert code == 0, err
    first = next(row["loss"] for row in rows_of(data / "next") if row["kind"] == "train")
    assert first == pytest.approx(ended[-1], rel=0.01)
    facts = json.loads((data / "next" / "head" / "config.json").read_text())["specdec_lab"]["facts"]
    assert facts["started_from"]["optimizer_steps"] > 0
    code, _, err = command("start=nowhere", "hydra.run.dir=other")
    assert code == 1
    assert "start='nowhere'" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_two_processes_share_one_folder(data: Path):
    """Guards CL-05 and TK-04: a launch of two processes makes one folder, whatever its time of day, and one W&B run.

    Its numbers are those of one process that takes twice the micro-batches.
    """
    folder = "hydra.run.dir=runs/${now:%H-%M-%S-%f}"
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(ROOT / "conf/accelerate/cpu2.yaml"),
    ]
    done = subprocess.run(
        [*launch, str(SCRIPT), *TINY, "target.device=auto", folder, "batch_size=2", "tracking=wandb",
         "tracking.mode=offline"],
        cwd=data, env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = (data / "runs").iterdir()
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1
    assert done.stdout.count("head: ") == 1
    alone = subprocess.run(
        [sys.executable, str(SCRIPT), *TINY, "batch_size=2", "accumulation=2"],
        cwd=data, env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    together, single = rows_of(run), rows_of(data / "run")
    assert [row["loss"] for row in together] == pytest.approx([row["loss"] for row in single], rel=1e-4)
    assert [row["labels"] for row in together if row["kind"] == "train"] == [
        row["labels"] for row in single if row["kind"] == "train"
    ]


def test_a_head_is_measured_without_being_trained(command, data: Path):
    """Accuracy and calibration of heads that are there, published ones too; the weights stay what they are."""
    head = ("head=medusa", "head.heads=2", "head.draft_vocab=null", "head.transitions=0.6", "precision=fp32")
    code, _, err = command(*head, "epochs=2", "hydra.run.dir=made")
    assert code == 0, err
    texts = ("data.repeats=5", "data.learn_prompts=true")  # settings of what is learnt are none of a measurement
    code, out, err = command(*head, *texts, "max_steps=0", "start=made/head", "hydra.run.dir=measured")
    assert code == 0, err
    numbers = rows_of(data / "measured")[-1]
    assert f"simulated acceptance length {numbers['simulated_acceptance_length']:.2f}" in out.replace("\n", " ")
    made, measured = (json.loads((data / run / "head" / "config.json").read_text()) for run in ("made", "measured"))
    facts = measured["specdec_lab"]["facts"]
    assert facts["optimizer_steps"] == facts["trained_on"]["labels"] == facts["training"]["repeats"] == 0
    assert facts["started_from"]["trained_on"] == made["specdec_lab"]["facts"]["trained_on"]
    shares = (one["accuracy_by_rank"][0] for one in (facts, made["specdec_lab"]["facts"]))
    assert next(shares) == pytest.approx(next(shares), abs=0.05)  # the file holds rounded weights
    weights = [(data / run / "head" / "medusa_lm_head.safetensors").read_bytes() for run in ("made", "measured")]
    assert weights[0] == weights[1]
    assert [len(line) for line in facts["calibration"]] in ([], [2], [2, 2])
    code, _, err = command(*head, "max_steps=0", "start=made/head", "data.validation_share=0", "hydra.run.dir=unseen")
    assert code == 1
    assert "data.validation_share=0.0: this chose no text to measure a head on" in err.replace("\n", " ")
    code, _, err = command("head=medusa2", "max_steps=0", "start=made/head", "hydra.run.dir=joint")
    assert code == 1
    assert "trained together with its target" in err.replace("\n", " ")
    code, _, err = command(*head, "max_steps=0", "hydra.run.dir=nothing")
    assert code == 1
    assert "max_steps=0: without steps a head is only measured" in err.replace("\n", " ")


def test_an_interruption_before_the_first_step_is_told(command, data: Path, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C while the target was loaded ended in exit code 130 and not a word."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec_lab.distill.train_command.build_examples", interrupted)
    code, _, err = command("head=medusa", "hydra.run.dir=early")
    assert code == 130
    assert "interrupted before the first step; go on with: " in err.replace("\n", " ")
    monkeypatch.undo()
    code, _, err = command("head=medusa", "head.heads=2", "head.draft_vocab=null", "hydra.run.dir=early", "resume=true")
    assert code == 0, err
