"""Whole benchmarks of the tiny target."""

from __future__ import annotations

import csv
import gc
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bench_inputs import PROMPTS, write_prompts

from specdec_lab.bench import metrics
from specdec_lab.bench import run as run_module
from specdec_lab.bench.columns import scalars
from specdec_lab.bench.records import RequestLog, RowKey, read_rows
from specdec_lab.bench.run import Strategy, enough_memory, reserve, run_rows
from specdec_lab.bench.schemas import fault
from specdec_lab.bench.settings import plan_run
from specdec_lab.bench.summary import StrategyFacts, summarise
from specdec_lab.cost import VerifyCost
from specdec_lab.decode import Request, speculative_decode
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.drafters.base import DraftContext
from specdec_lab.drafters.ngram import NgramDrafter
from specdec_lab.errors import InputError, NoRoomError
from specdec_lab.strategies import StrategyPlan
from specdec_lab.target import Target
from specdec_lab.targets.tiny import load_tiny
from specdec_lab.tree import DraftTree

TURNS = sum(len(prompt["turns"]) for prompt in PROMPTS)


def ids(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], tuple[list[int], list[int]]]:
    return {(*key(row), row["strategy"]): (row["prompt_ids"], row["output_ids"]) for row in rows}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["question_id"], row["turn"], row["repeat"]


def test_a_run_writes_what_the_schemas_say(config, run, tmp_path: Path):
    """Every row and the summary pass their schemas; each strategy, prompt, turn and repeat is there once."""
    summary, rows = run({**config, "repeats": 2})
    assert [fault("request", row) for row in rows] == [None] * len(rows)
    assert fault("summary", summary) is None
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    assert summary["complete"]
    assert len(ids(rows)) == len(rows) == 2 * 2 * TURNS
    assert {row["exact"] for row in rows} == {"baseline", "identical"}
    assert summary["prompts"]["turns"] == TURNS
    baseline, ngram = summary["strategies"]
    assert (baseline["name"], ngram["name"]) == ("autoregressive", "ngram")
    assert baseline["mean_acceptance_length"] == 1.0
    assert ngram["accepted"] > 0
    assert ngram["exactness"] == {
        "compared": 2 * TURNS, "identical": 2 * TURNS, "ties": 0, "different": 0, "examples": []
    }  # fmt: skip
    assert set(ngram["by_category"]) == {"talk", "sums"}
    for name in ("rounds", "accepted", "emitted", "output_tokens", "requests"):
        assert sum(part[name] for part in ngram["by_category"].values()) == ngram[name]
    times = ngram["time_seconds"]
    assert times["total"] == pytest.approx(sum(times[part] for part in metrics.TIME_PARTS))
    lines = list(csv.DictReader((tmp_path / "run" / "summary.csv").open()))
    assert [line["name"] for line in lines] == ["autoregressive", "ngram"]
    assert float(lines[1]["speedup.ratio_of_totals"]) == ngram["speedup"]["ratio_of_totals"]
    assert lines[0]["acceptance_rate"] == ""


def test_the_summary_follows_from_the_rows(config, run, tmp_path: Path):
    """Nothing is kept in memory only: rows read back give the same summary, so a resumed run tells no other story."""
    summary, _ = run(config)
    facts = {name: value for name, value in summary.items() if name not in ("strategies", "complete")}
    parts = ("target_weights", "draft_weights", "target_kv", "draft_kv")
    strategies = [
        StrategyFacts(
            entry["name"],
            entry["config"],
            entry["lossless"],
            {part: entry["memory_bytes"][part] for part in parts},
            entry["draft_training_tokens"],
        )
        for entry in summary["strategies"]
    ]
    rows = read_rows(tmp_path / "run" / "requests.jsonl")
    assert summarise(rows, facts, strategies, len(rows)) == summary
    assert not summarise(rows[1:], facts, strategies, len(rows))["complete"]


def test_answers_are_those_of_the_loop_alone(config, run):
    """The benchmark adds nothing to decoding: a prompt alone in a fresh target gives the same ids."""
    _, rows = run(config)
    target = load_tiny(device="cpu")
    for row in rows[::5]:
        request = Request(tuple(row["prompt_ids"]), 12)
        *_, last = speculative_decode(target, AutoregressiveDrafter(target), [request])
        assert last.generation is not None
        assert list(last.generation.output_ids) == row["output_ids"]


def test_a_batch_is_no_wider_than_there_are_prompts(config, run):
    """No memory for rows that nobody fills: a huge batch of few prompts takes the cache of the few."""
    wide, _ = run({**config, "batch_size": 100_000}, "wide")
    fitting, _ = run({**config, "batch_size": 2}, "fitting")
    count = wide["prompts"]["count"]
    assert wide["complete"]
    kv = [summary["strategies"][0]["memory_bytes"]["target_kv"] for summary in (wide, fitting)]
    assert kv[0] == kv[1] / 2 * count


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_batch_gives_the_ids_of_each_prompt_alone(config, run, temperature: float):
    """Batches refill rows and share rounds; neither ids nor contexts may depend on that."""
    config["sampling"] = {"temperature": temperature, "seed": 5}
    _, alone = run({**config, "batch_size": 1}, "alone")
    summary, together = run({**config, "batch_size": 3}, "together")
    assert ids(together) == ids(alone)
    assert summary["complete"]


def test_later_turns_continue_the_baselines_answer(config, tmp_path: Path):
    """All strategies decode the same contexts, also one whose own answer was another (here: of another model)."""
    plan = plan_run({**config, "strategies": []})
    target, other = load_tiny(device="cpu"), load_tiny(device="cpu", seed=1)
    strategies = [
        Strategy("autoregressive", AutoregressiveDrafter(target), target),
        Strategy("other", AutoregressiveDrafter(other), other),
    ]
    with RequestLog(tmp_path / "requests.jsonl", resume=False) as requests:
        run_rows(plan, strategies, requests)
    assert target.tokenizer is not None
    later = [row for row in requests.rows.values() if row["turn"]]
    assert len(later) == 2 * (TURNS - len(PROMPTS))
    for row in later:
        before = RowKey("autoregressive", row["question_id"], row["turn"] - 1, 0)
        own = requests.rows[before._replace(strategy="other")]
        shown = target.tokenizer.decode(row["prompt_ids"], skip_special_tokens=True)
        assert isinstance(shown, str)
        assert requests.rows[before]["text"] in shown
        assert own["text"] != requests.rows[before]["text"]
        assert own["text"] not in shown


class LossyDrafter(AutoregressiveDrafter):
    """Says of itself that it is lossy."""

    lossless = False


def test_a_lossy_strategy_is_marked(config, run, tmp_path: Path):
    """Numbers of a rule that changes the output never look like the others."""
    config["drafter"]["own"] = {"_target_": f"{__name__}.LossyDrafter"}
    summary, _ = run(config)
    assert [entry["lossless"] for entry in summary["strategies"]] == [True, True, False]
    assert "own (lossy)" in (tmp_path / "shown").read_text()


def test_sampling_shares_its_noise_between_strategies_and_not_between_repeats(config, run):
    """One seed gives one text whichever strategy drafts; another repeat or seed gives another."""
    config.update(sampling={"temperature": 1.0, "seed": 1}, repeats=2)
    summary, rows = run(config)
    assert summary["strategies"][1]["exactness"]["identical"] == 2 * TURNS
    texts = {(row["question_id"], row["turn"], row["repeat"]): row["output_ids"] for row in rows}
    assert texts[1, 0, 0] != texts[1, 0, 1]
    _, other = run({**config, "sampling": {"temperature": 1.0, "seed": 2}}, "other")
    assert ids(other) != ids(rows)


def test_stop_strings_reach_the_answers(config, run):
    """An answer that a stop string ended says so, and its text is cut before it."""
    _, rows = run(config)
    letter = next(row["text"][2] for row in rows if len(row["text"]) > 4 and row["text"][2] not in "\ufffd ")
    _, stopped = run({**config, "stop": [letter]}, "stopped")
    assert "stop" in {row["finish_reason"] for row in stopped}
    assert not any(letter in row["text"] for row in stopped)


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_too_long_is_a_failed_row(config, run, tmp_path: Path):
    """The others go on; a turn whose context is missing says why; the summary is not complete."""
    config["target"]["max_positions"] = 128
    long = {"question_id": 9, "category": "long", "turns": ["word " * 400, "and then?"]}
    write_prompts(Path(config["prompts"]["path"]), [PROMPTS[0], long, PROMPTS[1]])
    summary, rows = run(config)
    failed = [row for row in rows if row["status"] == "failed"]
    assert Counter((row["question_id"], row["turn"]) for row in failed) == {(9, 0): 2, (9, 1): 2}
    assert all("tokens and the target 128 positions" in row["error"] for row in failed if row["turn"] == 0)
    assert all("no answer to turn 0" in row["error"] for row in failed if row["turn"] == 1)
    assert [fault("request", row) for row in rows] == [None] * len(rows)
    assert all(row["output_ids"] == [] and row["exact"] is None for row in failed)
    assert not summary["complete"]
    assert [(entry["requests"], entry["failed"]) for entry in summary["strategies"]] == [(5, 2), (5, 2)]
    assert summary["strategies"][1]["by_category"]["long"]["speedup"]["ratio_of_totals"] is None
    assert "2 / 5" in (tmp_path / "shown").read_text()


class FailingDrafter(NgramDrafter):
    """Runs out of memory on prompts that hold the digit 7, and leaves nothing but NaN in the cache."""

    def propose(self, context: DraftContext) -> DraftTree:
        assert self.target.tokenizer is not None
        if "7" in str(self.target.tokenizer.decode(context.tokens[: context.prompt_length])):
            for row in range(self.target.cache.rows):
                for keys, values in self.target.cache.committed(row, self.target.cache.capacity).values():
                    keys.fill_(float("nan"))
                    values.fill_(float("nan"))
            raise RuntimeError("out of memory\nwhile allocating")
        return super().propose(context)


class SmallMemoryTarget(Target):
    """Has memory for so many tokens of cache, and says so as its base does, or as PyTorch does."""

    tokens = 10**9
    error: Exception = NoRoomError("a cache takes 9 GB and cpu has 1 GB free; use a smaller batch")

    def allocate(self, rows: int, tokens: int, tree_nodes: int) -> None:
        if rows * tokens > self.tokens:
            self._cache = None
            raise self.error
        super().allocate(rows, tokens, tree_nodes)


OUT_OF_MEMORY = (
    SmallMemoryTarget.error,
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
)


def small_memory(tokens: int, error: Exception = SmallMemoryTarget.error) -> SmallMemoryTarget:
    plain = load_tiny(device="cpu")
    target = SmallMemoryTarget(plain.model, plain.tokenizer, name=plain.name)
    target.tokens, target.error = tokens, error
    return target


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_too_little_memory_is_refused_before_the_folder_changes(config, run, tmp_path: Path, error: Exception):
    """One sentence, and results that overwrite=true would remove are still there."""
    run(config)
    before = files(tmp_path / "run")
    plan = plan_run({**config, "overwrite": True, "batch_size": 3})
    with pytest.raises(NoRoomError, match=r"^[^\n]*(memory does not suffice|GB free)[^\n]*$"):
        run(replace(plan, load_target=lambda: small_memory(20, error)))
    assert files(tmp_path / "run") == before


def test_only_a_lack_of_memory_is_called_one():
    """A fault of the program keeps its name and traceback."""
    with pytest.raises(RuntimeError, match="shapes differ"), enough_memory():
        raise RuntimeError("shapes differ")
    with pytest.raises(NoRoomError, match=r"does not suffice \(MemoryError\)"), enough_memory():
        raise MemoryError


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_memory_that_ends_during_the_run_fails_rows_only(config, tmp_path: Path, error: Exception):
    """What fits alone is decoded alone; what does not fit is a failed row with one sentence; the run goes on."""
    plan = plan_run({**config, "batch_size": 3})
    target = small_memory(110, error)
    strategies = [Strategy(one.name, one.drafter_class(target, **one.parameters), target) for one in plan.strategies]
    with RequestLog(tmp_path / "requests.jsonl", resume=False) as requests:
        run_rows(plan, strategies, requests)
    rows = list(requests.rows.values())
    assert len(rows) == 2 * TURNS
    failed = [row for row in rows if row["status"] == "failed"]
    assert 0 < len(failed) < len(rows)
    assert all("\n" not in row["error"] for row in failed)
    assert any("GB" in row["error"] or "memory" in row["error"] for row in failed)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_strategy_that_fails_on_a_prompt_fails_there_only(config, run, tmp_path: Path, batch_size: int):
    """One sentence in the row, the traceback in the log; the rest of its batch is decoded, with the right ids."""
    config["drafter"]["failing"] = {"_target_": f"{__name__}.FailingDrafter"}
    summary, rows = run({**config, "batch_size": batch_size})
    failed = [row for row in rows if row["status"] == "failed"]
    assert [(row["strategy"], row["question_id"]) for row in failed] == [("failing", 4)]
    assert failed[0]["error"] == "RuntimeError: out of memory"
    assert summary["strategies"][2]["exactness"]["identical"] == TURNS - 1
    assert not summary["complete"]
    assert "Traceback" in (tmp_path / "run" / "benchmark.log").read_text()
    assert "Traceback" not in (tmp_path / "shown").read_text()


def test_failed_rows_are_run_again_on_resume(config, run):
    """A failure may have been the machine's; what succeeded is not decoded again."""
    config["drafter"]["failing"] = {"_target_": f"{__name__}.FailingDrafter"}
    _, before = run(config)
    mended = {**config, "resume": True}
    plan = plan_run(mended)
    well = replace(plan.strategies[2], drafter_class=NgramDrafter)
    summary, after = run(replace(plan, strategies=(*plan.strategies[:2], well)))
    assert summary["complete"]
    assert len(after) == len(before)
    assert [row for row in after if row["question_id"] != 4] == [row for row in before if row["question_id"] != 4]


# --- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [b"", b'{"strategy": "ngram", "question_id"', b"\xf0\x9f"])
def test_a_run_goes_on_where_it_was_killed(config, run, tmp_path: Path, torn: bytes):
    """The same rows as an uninterrupted run, none lost or doubled; finished rows are kept to the last digit."""
    _, whole = run(config)
    path = tmp_path / "run" / "requests.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [{**json.loads(line), "exact": None} for line in lines[:7]]
    path.write_bytes("".join(json.dumps(row) + "\n" for row in kept).encode() + torn)
    (tmp_path / "run" / "summary.json").unlink()
    summary, resumed = run({**config, "resume": True})
    assert summary["complete"]
    assert ids(resumed) == ids(whole)
    assert len(resumed) == len(whole)
    assert resumed[:7] == whole[:7]


def test_a_run_that_goes_on_has_the_trees_that_it_had(config, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards BM-09: tree sizes hang on a clock, and all counters on them; the run states the times and keeps them."""
    times = iter([{1: 30.0, 17: 31.0}, {1: 30.0, 17: 3000.0}])
    monkeypatch.setattr(run_module, "measure_verify_cost", lambda *given, **named: VerifyCost(next(times)))
    sized = {"hybrid": {"_target_": "specdec_lab.drafters.hybrid.HybridDrafter"}}
    config = {**config, "drafter": {**config["drafter"], **sized}, "max_new_tokens": 12}
    before, whole = run(config)
    assert before["verify_ms"] == {"1": 30.0, "17": 31.0}
    path = tmp_path / "run" / "requests.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    after, resumed = run({**config, "resume": True})
    assert after["verify_ms"] == before["verify_ms"]
    trees = [sorted((str(key(row)), row["proposed_nodes_per_round"]) for row in rows) for rows in (whole, resumed)]
    assert trees[0] == trees[1]
    _, other = run(config, "other")
    assert trees[0] != sorted((str(key(row)), row["proposed_nodes_per_round"]) for row in other)
    stated = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({**stated, "verify_ms": {1: "fast"}}))
    with pytest.raises(InputError, match="verify_ms that cannot be"):
        run({**config, "resume": True})


def test_a_finished_run_resumed_decodes_nothing(config, run):
    """The rows stay as they are, and the numbers with them."""
    before, rows = run(config)
    after, again = run({**config, "resume": True})
    assert again == rows
    for old, new in zip(before["strategies"], after["strategies"], strict=True):
        assert old == new


def test_resume_refuses_other_settings(config, run):
    """Rows of two configurations in one file would be one number too many; the message names what differs."""
    run(config)
    changed = {**config, "resume": True, "max_new_tokens": 13, "sampling": {"temperature": 1.0}}
    with pytest.raises(InputError, match=r"max_new_tokens=13 \(was 12\).*sampling.temperature=1.0 \(was 0\)"):
        run(changed)
    run({**config, "resume": True, "tracking": {"mode": "disabled"}})  # where it is tracked does not matter


@pytest.mark.parametrize("change", [{"turns": ["the one and the other", "another"]}, {"category": "other"}])
def test_resume_refuses_other_prompts_before_anything_is_loaded(config, run, tmp_path: Path, change: dict[str, Any]):
    """The settings are the same, but the file that they name is not: a second turn or a category counts as well."""
    config["drafter"]["failing"] = {"_target_": f"{__name__}.FailingDrafter"}
    run(config)
    before = files(tmp_path / "run")
    write_prompts(Path(config["prompts"]["path"]), [{**PROMPTS[0], **change}, *PROMPTS[1:]])
    plan = replace(plan_run({**config, "resume": True}), load_target=lambda: pytest.fail("the target was loaded"))
    with pytest.raises(InputError, match=r"prompts.path=.*the prompts are others"):
        run(plan)
    assert files(tmp_path / "run") == before


def test_resume_refuses_rows_of_other_tokens(config, run, tmp_path: Path):
    """The prompts are the same, but tokenizer or chat template make others of them; nothing on disk has changed."""
    config["drafter"]["failing"] = {"_target_": f"{__name__}.FailingDrafter"}
    run(config)
    before = files(tmp_path / "run")
    assert b'"status": "failed"' in before["requests.jsonl"]
    plan = plan_run({**config, "resume": True})

    def other_template() -> Target:
        target = load_tiny(device="cpu")
        assert target.tokenizer is not None
        target.tokenizer.chat_template = "{{ messages[0]['content'] }}"
        return target

    with pytest.raises(InputError, match=r"prompts.path=.*question 1: .*decoded from other tokens"):
        run(replace(plan, load_target=other_template))
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("git_sha", "0" * 40),
        ("versions.torch", "1.0"),
        ("machine.cpu", "another"),
        ("machine.gpu", "another"),
        ("machine.threads", 99),
    ],
)
def test_resume_refuses_other_code_or_another_machine(config, run, tmp_path: Path, field: str, value: object):
    """Times of two machines or versions in one file would be compared as if they were of one."""
    run(config)
    path = tmp_path / "run" / "config.yaml"
    stated = yaml.safe_load(path.read_text("utf-8"))
    *above, name = f"provenance.{field}".split(".")
    node = stated
    for part in above:
        node = node[part]
    node[name] = value
    path.write_text(yaml.safe_dump(stated))
    before = files(tmp_path / "run")
    with pytest.raises(InputError, match=rf"resume=True: .*made with something else: provenance\.{field}=.*was"):
        run({**config, "resume": True})
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize(
    "content", [b"", b"[1, 2]", b"text", b"a: [1", b"\xff\xfe\x00", b"when: 2024-99-99", b"1: 2\nsampling: 3\n"]
)
def test_resume_refuses_a_damaged_config(config, run, tmp_path: Path, content: bytes):
    """Nobody can tell what its rows were made with; one sentence says so."""
    run(config)
    (tmp_path / "run" / "config.yaml").write_bytes(content)
    before = files(tmp_path / "run")
    with pytest.raises(InputError, match=r"^resume=True: [^\n]+$"):
        run({**config, "resume": True})
    assert files(tmp_path / "run") == before


def test_overwrite_starts_anew(config, run):
    """Every row is decoded again."""
    run(config)
    with pytest.raises(InputError, match="overwrite=true"):
        run(config)
    summary, rows = run({**config, "overwrite": True, "max_new_tokens": 5})
    assert summary["complete"]
    assert {len(row["output_ids"]) for row in rows} <= set(range(1, 6))


# --- measuring -------------------------------------------------------------------------------------------------------


class FakeClock:
    """Seconds that pass only where a test lets them."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowFirstTarget(Target):
    """Each forward takes 1 s and each prefill 2 s of the fake clock; the first of each takes 500 s more."""

    def __init__(self, plain: Target, clock: FakeClock) -> None:
        self.clock, self.started = clock, set[str]()
        super().__init__(plain.model, plain.tokenizer, name=plain.name)
        self.started.clear()  # set-up checks the model with a few forwards of its own

    def _take(self, what: str, seconds: float) -> None:
        self.clock.now += seconds + (0 if what in self.started else 500)
        self.started.add(what)

    def prefill(self, *args: Any, **kwargs: Any) -> Any:
        self._take("prefill", 2)
        return super().prefill(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._take("forward", 1)
        return super().forward(*args, **kwargs)


class SlowFirstDrafter(NgramDrafter):
    """Needs 700 s of the fake clock for its first draft and 0.25 s for every other."""

    warm = False

    def propose(self, context: DraftContext) -> DraftTree:
        assert isinstance(self.target, SlowFirstTarget)
        self.target.clock.now += 0.25 if self.warm else 700
        self.warm = True
        return super().propose(context)


def test_neither_first_calls_nor_the_order_change_a_result(config, run):
    """Guards BM-04: a slow first call of target and drafter is warmed up; with swapped strategies all is the same."""

    def measured(order: int) -> dict[str, Any]:
        clock = FakeClock()
        plan = plan_run(config)
        slow = StrategyPlan("ngram", SlowFirstDrafter, plan.strategies[1].parameters)
        plan = replace(
            plan,
            strategies=(plan.strategies[0], slow)[::order],
            load_target=lambda: SlowFirstTarget(load_tiny(device="cpu"), clock),
        )
        summary, _ = run(plan, f"order{order}", clock=clock)
        return {entry["name"]: entry for entry in summary["strategies"]}

    there, back = measured(1), measured(-1)
    for name in ("autoregressive", "ngram"):
        numbers = dict(scalars(there[name]))
        del numbers["memory_bytes.peak"]
        assert {key: dict(scalars(back[name]))[key] for key in numbers} == pytest.approx(numbers)
    baseline, ngram = there["autoregressive"], there["ngram"]
    assert baseline["decode_tokens_per_second"] == pytest.approx(1.0)
    assert baseline["time_seconds"]["prefill"] == pytest.approx(2 * TURNS)
    assert ngram["time_seconds"]["verify"] == pytest.approx(ngram["rounds"])
    assert ngram["time_seconds"]["draft"] < 0.25 * ngram["rounds"] + 1e-6


def test_the_garbage_collector_stays_out_of_what_is_timed(config, run):
    """Guards BM-04: one pass over all objects, half a second here, made a strategy four times as slow as it was."""
    passes: list[bool] = []
    asleep: list[bool] = []
    decode = run_module.speculative_decode

    def watched(*given: Any, **named: Any) -> Any:
        asleep.append(not gc.isenabled())
        before = len(passes)
        yield from decode(*given, **named)
        assert not asleep[-1] or len(passes) == before

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            passes.append(True)

    gc.callbacks.append(note)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_module, "speculative_decode", watched)
            summary, _ = run(config)
    finally:
        gc.callbacks.remove(note)
    assert summary["complete"]
    assert passes, "between the answers"
    assert asleep.count(True) >= len(asleep) - len(summary["strategies"])  # all but the warm-ups
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_strategies_take_turns_prompt_by_prompt(config, run, tmp_path: Path):
    """Guards BM-04: in the file as in time, strategies alternate, and who begins rotates from prompt to prompt."""
    config["drafter"]["third"] = {"_target_": "specdec_lab.drafters.ngram.NgramDrafter", "k": 1}
    _, rows = run(config)
    firsts = []
    for start in range(0, len(rows), 3):
        block = rows[start : start + 3]
        assert len({key(row) for row in block}) == 1
        assert len({row["strategy"] for row in block}) == 3
        firsts.append(block[0]["strategy"])
    assert set(firsts) == {"autoregressive", "ngram", "third"}


@pytest.mark.parametrize("exact", ["off", "fixed_shape"])
@pytest.mark.parametrize("turns", [1, 3])
def test_no_request_waits_for_a_larger_cache(config, tmp_path: Path, exact: str, turns: int):
    """Guards BM-04: prompts of one turn get one cache for the whole run; later turns never change it within a block."""
    write_prompts(Path(config["prompts"]["path"]), [{**one, "turns": one["turns"][:turns]} for one in PROMPTS])
    plan = plan_run({**config, "max_new_tokens": 40, "exact": exact})
    target = plan.load_target()
    strategies = [Strategy(one.name, one.drafter_class(target, **one.parameters), target) for one in plan.strategies]
    caches: list[object] = []
    with RequestLog(tmp_path / "requests.jsonl", resume=False) as requests:
        reserve(plan, strategies)
        run_rows(plan, strategies, requests, lambda name: caches.append(target.cache))
    assert len(caches) == len(requests.rows)
    assert all(first is second for first, second in zip(caches[::2], caches[1::2], strict=True))
    if turns == 1:
        assert all(cache is caches[0] for cache in caches)
    assert target.cache.capacity < 3 * max(len(row["prompt_ids"]) + 40 for row in requests.rows.values()) + 512


def test_fixed_shape_is_also_compared_with_the_unpadded_baseline(config, run):
    """Padding costs time, so its speed-up over a padded baseline alone would flatter it."""
    summary, rows = run({**config, "exact": "fixed_shape"})
    names = [entry["name"] for entry in summary["strategies"]]
    assert names == ["autoregressive", "ngram", "autoregressive_unpadded"]
    assert fault("summary", summary) is None
    for entry in summary["strategies"]:
        assert entry["speedup"]["baseline"] == "autoregressive"
        assert entry["speedup_over_unpadded"]["baseline"] == "autoregressive_unpadded"
    assert summary["strategies"][2]["speedup_over_unpadded"]["ratio_of_totals"] == 1.0
    assert len(rows) == 3 * TURNS


def test_threads_are_stated_and_put_back(config, run):
    """The number that the run used is in the file, and the next job of a sweep does not inherit it."""
    torch.set_num_threads(1)
    summary, _ = run({**config, "threads": 2})
    assert summary["machine"]["threads"] == 2
    assert torch.get_num_threads() == 1
