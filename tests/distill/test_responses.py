"""The target answers prompts: the right ones, to the right contexts, once each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from rich.console import Console

from specdec_lab.bench.prompts import Prompt
from specdec_lab.chat import render_chat
from specdec_lab.decode import Request, speculative_decode
from specdec_lab.distill.response_files import MANIFEST, PACKED, RESPONSES, WRITTEN, Response, read_responses, read_rows
from specdec_lab.distill.responses import (
    answer_text,
    check_run,
    decoding_order,
    generate_responses,
    open_user_turn,
    plan_generation,
    turn_messages,
)
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.errors import InputError
from specdec_lab.sampling import SamplingParams
from specdec_lab.targets.tiny import build_tokenizer, load_tiny

ROOT = Path(__file__).parents[2]
SECRET = "the one and the other"
PROMPTS = [
    Prompt(1, "talk", (f"{SECRET} and the one and the", "and then the one")),
    Prompt(2, "sums", ("1 2 3 1 2 3 1 2 3",)),
    Prompt("x3", "talk", ("he said that she said", "who said that", "so?")),
    Prompt(4, "sums", ("7 * 7",)),
]


def write_prompts(path: Path, prompts: list[Prompt]) -> Path:
    rows = [{"question_id": one.question_id, "category": one.category, "turns": one.turns} for one in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def generate(tmp_path: Path) -> Callable[..., tuple[dict[tuple[Any, ...], Response], dict[str, Any]]]:
    """Return ``(overrides, folder) -> (responses by key, manifest)``: a whole run on the tiny target."""
    path = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)

    def run(*overrides: str, folder: str = "run") -> tuple[dict[tuple[Any, ...], Response], dict[str, Any]]:
        plan = plan_generation(composed(f"prompts.paths=[{path}]", "max_new_tokens=12", *overrides))
        (tmp_path / folder).mkdir(exist_ok=True)
        check_run(plan, tmp_path / folder)
        with (tmp_path / "shown").open("a") as shown:
            manifest = generate_responses(plan, tmp_path / folder, Console(file=shown))
        return {tuple(row.key): row for row in read_rows(tmp_path / folder / RESPONSES)}, manifest

    return run


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_module("specdec_lab.conf", version_base="1.3"):
        config = compose("generate_responses", overrides=["target=tiny", "target.device=cpu", *overrides])
        plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def alone(ids: tuple[int, ...], key: tuple[Any, ...], sampling: SamplingParams) -> tuple[int, ...]:
    """Decode one answer by itself."""
    target = load_tiny(device="cpu")
    request = Request(ids, 12, noise_key=key)
    steps = list(speculative_decode(target, AutoregressiveDrafter(target), [request], sampling=sampling))
    assert steps[-1].generation is not None
    return steps[-1].generation.output_ids


# --- what is answered ------------------------------------------------------------------------------------------------


def test_each_turn_is_answered_to_the_targets_own_earlier_answers(generate):
    """Guards TD-16, TV-05: contexts are rendered once, with one BOS, and later turns continue the greedy answer."""
    rows, manifest = generate("samples=[0,2]", "sampling.temperature=1", "batch_size=2")
    expected = {(one.question_id, turn, s) for one in PROMPTS for turn in range(len(one.turns)) for s in (0, 2)}
    assert rows.keys() == expected
    assert manifest["complete"]
    tokenizer = build_tokenizer()
    for prompt in PROMPTS:
        answers: list[str] = []
        for turn in range(len(prompt.turns)):
            ids = render_chat(tokenizer, turn_messages(prompt, answers))
            assert ids.count(tokenizer.bos_token_id) == 1
            for sample, sampling in ((0, SamplingParams()), (2, SamplingParams(1.0))):
                key = (prompt.question_id, turn, sample)
                assert rows[key].response_ids == alone(ids, key, sampling), key
            greedy = rows[prompt.question_id, turn, 0]
            answers.append(answer_text(tokenizer, greedy.response_ids, greedy.finished))
    assert rows[1, 0, 0].response_ids != rows[1, 0, 2].response_ids


def test_an_answer_that_ends_keeps_its_eos(generate):
    """Guards TD-01: the end of an answer is a label; ``finished`` says whether it is there."""
    rows, manifest = generate("samples=[0,1,2,3,4]", "sampling.temperature=3", "prompts.limit=2", "max_new_tokens=99")
    eos = build_tokenizer().eos_token_id
    assert {row.finished for row in rows.values()} == {True, False}
    for row in rows.values():
        assert (row.response_ids[-1] == eos) == row.finished
        assert eos not in row.response_ids[:-1]
        assert row.finished or len(row.response_ids) == 99
    assert manifest["counts"]["finished"] == sum(row.finished for row in rows.values())


def test_the_batch_does_not_change_an_answer(generate):
    """The same rows in float32, one by one and in batches with refilled rows, greedy and drawn, in any order."""
    common = ("samples=[0,1]", "sampling.temperature=1")
    one, _ = generate(*common, "batch_size=1", folder="one")
    three, _ = generate(*common, "batch_size=3", "seed=0", folder="three")
    assert one == three
    other, _ = generate(*common, "batch_size=3", "seed=1", folder="other")
    assert {key for key in one if one[key] != other[key]} >= {(1, 0, 1), (2, 0, 1)}
    assert all(one[key] == other[key] for key in one if key[2] == 0)


def test_long_turns_are_left_out_and_counted(generate):
    """A turn whose prompt is too long has no row, nor have the turns after it."""
    tokenizer = build_tokenizer()
    first = len(render_chat(tokenizer, turn_messages(PROMPTS[2], [])))
    rows, manifest = generate(f"max_prompt_tokens={first}")
    assert ("x3", 0, 0) in rows
    assert not {key for key in rows if key[1] > 0}
    assert (1, 0, 0) not in rows
    assert manifest["counts"]["turns_too_long"] == 2 + 1 + 2
    assert manifest["complete"]


def test_a_run_without_any_answer_is_no_success(tmp_path: Path):
    """An empty run folder was told as success, and the training after it found nothing to learn."""
    write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    command = [sys.executable, str(ROOT / "scripts" / "generate_responses.py"), "target=tiny", "target.device=cpu"]
    command += ["prompts.paths=[prompts.jsonl]", "max_prompt_tokens=3", "max_new_tokens=4", "hydra.run.dir=run"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "max_prompt_tokens=3: all " in ended.stderr.replace("\n", " ")
    assert "Traceback" not in ended.stderr


def test_the_manifest_says_what_was_answered_and_no_prompt_is_written(generate, tmp_path: Path):
    """Everything to reproduce the answers, but neither texts of prompts nor folders of this machine."""
    generate("samples=[0,1]")
    stated = json.loads((tmp_path / "run" / MANIFEST).read_text())
    assert stated["target"] == {"name": "tiny", "model": "random-llama-2x64", "revision": None, "dtype": "float32"}
    assert [file["name"] for file in stated["prompts"]] == ["prompts.jsonl"]
    assert stated["max_prompt_tokens"] == 256
    assert stated["sampling"]["temperature"] == 0.8
    assert stated["counts"]["rows"] == 14
    assert stated["versions"]["specdec-lab"]
    packed = read_responses(tmp_path / "run" / PACKED)
    assert packed.manifest is not None
    assert packed.manifest["prompts"] == stated["prompts"]
    for name in (RESPONSES, MANIFEST, PACKED):
        data = (tmp_path / "run" / name).read_bytes()
        assert SECRET.encode() not in data
        assert str(tmp_path).encode() not in data


# --- resuming --------------------------------------------------------------------------------------------------------


def test_samples_and_prompts_can_be_added(generate, tmp_path: Path):
    """What is there stays, byte by byte, and only what is missing is decoded."""
    before, _ = generate("samples=[0]", "prompts.limit=2")
    kept = (tmp_path / "run" / RESPONSES).read_bytes()
    rows, manifest = generate("samples=[0,1]", "resume=true", "batch_size=3")
    assert (tmp_path / "run" / RESPONSES).read_bytes().startswith(kept)
    assert {key: rows[key] for key in before} == before
    assert rows == generate("samples=[0,1]", folder="whole")[0]
    assert manifest["samples"] == [0, 1]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sampling.temperature=0.5", "sampling.temperature=0.5 .was 0.8"),
        ("seed=1", "sampling.seed=1"),
        ("max_new_tokens=13", "max_new_tokens=13 .was 12"),
        ("max_prompt_tokens=9", "max_prompt_tokens=9"),
        ("target.dtype=bfloat16", "target.dtype='bfloat16' .was 'float32'"),
    ],
)
def test_answers_of_other_settings_are_not_mixed(generate, override: str, sentence: str):
    generate("prompts.limit=1")
    with pytest.raises(InputError, match=f"resume=True: .*{sentence}"):
        generate("prompts.limit=1", "resume=true", override)


def test_prompts_that_were_answered_must_still_be_there(generate, tmp_path: Path):
    """Guards TD-10: prompts are known by their content, so that an id cannot come to mean another question."""
    generate("prompts.limit=1")
    write_prompts(tmp_path / "prompts.jsonl", PROMPTS[:2])
    with pytest.raises(
        InputError, match=r"prompts.paths=\['prompts.jsonl'\]: .*answered another content of prompts.jsonl"
    ):
        generate("prompts.limit=1", "resume=true")


def test_a_killed_run_goes_on_without_a_lost_or_doubled_row(generate, tmp_path: Path):
    """After kill -9 in the middle, in a process of its own, resume gives the rows of an uninterrupted run."""
    options = ["samples=[0,1]", "max_new_tokens=250", "batch_size=2"]
    command = [sys.executable, str(ROOT / "scripts" / "generate_responses.py"), "target=tiny", "target.device=cpu"]
    command += ["prompts.paths=[prompts.jsonl]", "hydra.run.dir=run", "max_prompt_tokens=4000", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        path, deadline = tmp_path / "run" / RESPONSES, time.monotonic() + 120
        while not (path.exists() and path.read_bytes().count(b"\n") >= 3):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    kept = path.read_bytes()
    assert 3 <= len(read_rows(path)) < 14
    assert not json.loads((tmp_path / "run" / MANIFEST).read_text())["complete"]
    path.write_bytes(kept + b'{"question_id":1,"tu')
    rows, manifest = generate(*options, "max_prompt_tokens=4000", "resume=true")
    assert path.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    assert rows == generate(*options, "max_prompt_tokens=4000", folder="whole")[0]
    assert len(rows) == 14
    assert manifest["complete"]
    assert (tmp_path / "run" / PACKED).read_bytes() == (tmp_path / "whole" / PACKED).read_bytes()


# --- prompts of the target's own --------------------------------------------------------------------------------------


def test_the_user_turn_is_left_open():
    """Guards TV-05: what stands before the user's first words, with one BOS, whatever those words are."""
    tokenizer = build_tokenizer()
    opening = open_user_turn(tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(opening)) == ["<s>", "<user>"]
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        open_user_turn(tokenizer)


def test_the_target_writes_prompts_and_answers_them(generate, tmp_path: Path):
    """Such rows carry the prompt, also when packed; what is no prompt is counted by reason, and more can be added."""
    tokenizer = build_tokenizer()
    broken = [(token,) for token in range(len(tokenizer)) if "\ufffd" in str(tokenizer.decode([token]))]
    greedy = SamplingParams(bad_words=tuple(broken))
    forbidden = f"sampling.bad_words={[list(ids) for ids in broken]}"
    common = ("sampling.temperature=3", forbidden, "prompts.paths=[]", "max_prompt_tokens=200")
    rows, manifest = generate("prompts.self_written=12", *common)
    counts = manifest["counts"]["self_written"]
    assert sum(counts.values()) == 12
    assert counts["unfinished"] > 1
    assert len(rows) == counts["kept"] > 2
    written = {row.sample: row for row in read_rows(tmp_path / "run" / WRITTEN)}
    for (question_id, turn, sample), row in rows.items():
        assert (turn, sample) == (0, 0)
        source = written[int(str(question_id).removeprefix("self/"))]
        assert source.finished
        assert row.prompt == answer_text(tokenizer, source.response_ids, True).strip()
        ids = render_chat(tokenizer, [{"role": "user", "content": row.prompt}])
        assert len(ids) <= 200
        assert row.response_ids == alone(ids, (question_id, 0, 0), greedy)
    assert {row.prompt for row in read_responses(tmp_path / "run" / PACKED).responses} == {
        row.prompt for row in rows.values()
    }
    more, _ = generate("prompts.self_written=20", *common, "resume=true")
    assert len(more) > len(rows)
    assert {key: more[key] for key in rows} == rows
    assert more == generate("prompts.self_written=20", *common, "batch_size=3", folder="whole")[0]


def test_a_prompt_of_its_own_goes_on_from_an_opening(generate, tmp_path: Path):
    """Openings take turns, the target sees them, and the prompt holds them."""
    tokenizer = build_tokenizer()
    openings = ("The ", "")
    broken = [(token,) for token in range(len(tokenizer)) if "\ufffd" in str(tokenizer.decode([token]))]
    forbidden = f"sampling.bad_words={[list(ids) for ids in broken]}"
    common = ("sampling.temperature=3", forbidden, "prompts.paths=[]", "max_prompt_tokens=200")
    rows, _ = generate(f"prompts.openings={json.dumps(openings)}", *common, "prompts.self_written=20")
    start = open_user_turn(tokenizer)
    written = {row.sample: row for row in read_rows(tmp_path / "run" / WRITTEN)}
    sampling = SamplingParams(temperature=3.0, bad_words=tuple(broken))
    for sample in (0, 1):
        begun = tokenizer(openings[sample], add_special_tokens=False)["input_ids"]
        ids = alone((*start, *begun), ("self", 0, sample), sampling)
        assert written[sample].response_ids[: len(ids)] == ids[: len(written[sample].response_ids)]
    numbers = {int(str(key[0]).removeprefix("self/")): row.prompt for key, row in rows.items()}
    assert any(number % 2 == 0 for number in numbers)
    assert all(str(prompt).startswith("The") for number, prompt in numbers.items() if number % 2 == 0)


def test_answers_that_are_there_already_are_not_made_again(generate, tmp_path: Path):
    """They still are what later turns continue."""
    everything, _ = generate(folder="everything")
    first = {key: row for key, row in everything.items() if key[1] == 0}
    kept = tmp_path / "first.jsonl"
    kept.write_text("".join(row.model_dump_json(exclude_none=True) + "\n" for row in first.values()))
    rest, manifest = generate(f"answered=[{kept}]", folder="rest")
    assert rest == {key: row for key, row in everything.items() if key not in first}
    assert rest
    assert manifest["answered"] == ["first.jsonl"]


# --- settings --------------------------------------------------------------------------------------------------------


def test_leaking_prompts_are_refused_or_left_out(generate, tmp_path: Path):
    """A prompt of an evaluation file is refused before a target is loaded, or has no row."""
    path = write_prompts(tmp_path / "bench.jsonl", [Prompt(81, "math", ("7 * 7!",))])
    with pytest.raises(InputError, match=r"prompts.paths='1 of 4 prompts': .*4 \(bench.jsonl 81, 100 %\)"):
        generate(f"evaluation=[{path}]")
    rows, manifest = generate(f"evaluation=[{path}]", "drop_leaks=true")
    assert {key[0] for key in rows} == {1, 2, "x3"}
    assert manifest["counts"]["leaks_dropped"] == 1


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["prompts.paths=[]"], r"prompts.paths=\[\]: there is nothing to answer"),
        (["prompts.paths=absent.jsonl"], r"prompts.paths='absent.jsonl': give a list, as \[absent.jsonl\]"),
        (["prompts.paths=[absent.jsonl]"], "prompts.paths='absent.jsonl': it cannot be read"),
        (["prompts.limit=0"], "prompts.limit=0: "),
        (["prompts.self_written=-1"], "prompts.self_written=-1: "),
        (["samples=[]"], r"samples=\[\]: "),
        (["samples=[0,0]"], r"samples=\[0, 0\]: a sample is in the list twice"),
        (["samples=[1]"], r"samples=\[1\]: some prompts have several turns"),
        (["samples=[0,1]", "sampling.temperature=0"], "sampling.temperature=0.0: all samples but 0"),
        (["prompts.self_written=3", "sampling.temperature=0"], "sampling.temperature=0.0: all samples but 0"),
        (["sampling.min_new_tokens=193"], "sampling.min_new_tokens=193: "),
        (["max_new_tokens=0"], "max_new_tokens=0: "),
        (["batch_size=0"], "batch_size=0: "),
        (["evaluation=[absent.jsonl]"], "evaluation='absent.jsonl': there is no such file"),
        (["target.dtype=int3"], "target.dtype='int3': "),
        (["+colour=red"], "colour='red': "),
        (["+prompts.colour=red"], "prompts.colour='red': "),
    ],
)
def test_wrong_input_is_named_before_a_target_is_loaded(tmp_path: Path, overrides: list[str], sentence: str):
    path = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    with pytest.raises(InputError, match=sentence) as refused:
        plan_generation(composed(f"prompts.paths=[{path}]", *overrides))
    assert "\n" not in str(refused.value)


def test_the_order_holds_every_prompt_once_and_neighbours_are_about_as_long():
    """Chunks rise and fall by turns, so that the longest of one stand beside the longest of the next."""
    lengths = [(7 * at) % 101 for at in range(101)]
    order = decoding_order(lengths, chunk=25, seed=3)
    assert sorted(order) == list(range(101))
    shown = [lengths[at] for at in order]
    for start in range(0, 100, 25):
        part = shown[start : start + 25]
        assert part == sorted(part, reverse=(start // 25) % 2 == 1)
        assert max(part) - min(part) > 50  # a chunk is drawn from all prompts
    assert order != decoding_order(lengths, chunk=25, seed=4)
    assert decoding_order([], 25, 0) == []
