"""Which runs are compared, which are refused and by what name, and what strategies are called."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from compared_runs import BASELINE, QUICK, THREE, facts, made_row, made_rows, made_run, write_run

from specdec_lab.bench.schemas import load_schema
from specdec_lab.compare.comparable import FACTS, check_comparable, differences, plain
from specdec_lab.compare.comparison import compare
from specdec_lab.compare.entries import entry_labels
from specdec_lab.compare.runs import Run, read_run, read_runs
from specdec_lab.errors import InputError

TWO = {"autoregressive": BASELINE, "ngram": QUICK}

CHANGES: dict[str, dict[str, Any]] = {
    "machine": {"machine": {**facts()["machine"], "cpu": "another"}},
    "threads": {"machine": {**facts()["machine"], "threads": 8}},
    "target": {"target": {**facts()["target"], "model": "owner/other"}},
    "revision": {"target": {**facts()["target"], "revision": "r2"}},
    "dtype": {"target": {**facts()["target"], "dtype": "float32", "weight_bytes": 4000}},  # twice the bytes a weight
    "prompts": {"prompts": {**facts()["prompts"], "sha256": "cd" * 32}},
    "versions": {"versions": {**facts()["versions"], "torch": "2.10.0"}},
    "acceptance": {"acceptance": "block"},
    "sampling": {"sampling": {**facts()["sampling"], "temperature": 0.7}},
    "exact": {"exact": "fixed_shape"},
    "max_new_tokens": {"max_new_tokens": 64},
    "stop": {"config": {"stop": ["###"]}},
    "batch_size": {"batch_size": 4},
    "batch_nodes": {"batch_nodes": 64},
    "repeats": {"repeats": 2},
    "seed": {"seed": 7, "sampling": {**facts()["sampling"], "seed": 7}},  # as the settings have it
    "git_sha": {"git_sha": None},
    "complete": {"complete": False},
}
"""For each fact a run that differs in it alone."""


def test_every_fact_has_a_case():
    """A fact that nobody tries could be read wrongly for ever; and only what changes no law or time is just named."""
    assert set(CHANGES) == {fact.name for fact in FACTS}
    assert {fact.name for fact in FACTS if not fact.refused} == {"repeats", "seed", "git_sha", "complete"}


def test_no_field_of_a_summary_is_forgotten():
    """A setting that the summary gets later must be compared, or be named here as one that changes no number."""
    harmless = {"schema_version", "created", "strategies", "verify_ms"}
    read: set[str] = set()

    class Watched(dict):
        def __getitem__(self, key: str) -> Any:
            read.add(key)
            return super().__getitem__(key)

    run = Run(Path("any"), Watched(facts(complete=True)), (), {})
    for fact in FACTS:
        fact.read(run)
    assert set(load_schema("summary")["required"]) - read == harmless


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that the others are compared with."""
    return made_run(tmp_path_factory.mktemp("runs") / "one", TWO)


def changed(one: Path, folder: Path, *, config: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """Copy a run and change what its summary or its configuration says."""
    shutil.copytree(one, folder)
    _edit(folder, **changes)
    if config is not None:
        settings = yaml.safe_load((folder / "config.yaml").read_text())
        (folder / "config.yaml").write_text(yaml.safe_dump({**settings, **config}))
    return folder


@pytest.mark.parametrize("name", CHANGES)
def test_runs_that_differ_are_refused_or_named(tmp_path: Path, one: Path, name: str):
    """Guards BM-07: never compared silently. What can change a number is refused until it is allowed by name."""
    folders = [one, changed(one, tmp_path / "two", **CHANGES[name])]
    runs = read_runs(folders)
    assert [found.fact for found in differences(runs)] == [name]
    fact = next(fact for fact in FACTS if fact.name == name)
    if fact.refused:
        with pytest.raises(InputError, match=rf"differ in {name} \(.*one: .*; .*two: .*--allow {name} "):
            check_comparable(runs, ())
    (found,) = check_comparable(runs, [name] if fact.refused else [])
    assert (found.fact, len(found.values)) == (name, 2)


def test_an_allowed_difference_is_named_wherever_it_matters(tmp_path: Path, one: Path):
    """In the comparison, and in each pair of strategies of the two runs; not in pairs of one run."""
    comparison = compare([one, changed(one, tmp_path / "two", **CHANGES["dtype"])], allow=["dtype"])
    assert [found.values for found in comparison.differences] == [("bfloat16", "float32")]
    for pair in comparison.pairs:
        across = ("run 1" in pair["first"]) != ("run 1" in pair["second"])
        assert pair["unlike"] == (["dtype"] if across else [])


def test_equal_runs_differ_in_nothing(tmp_path: Path, one: Path):
    """The other side: two runs of one configuration are compared without any leave."""
    comparison = compare([one, made_run(tmp_path / "two", TWO, noise=1)])
    assert comparison.differences == ()
    assert [pair["unlike"] for pair in comparison.pairs] == [[]] * len(comparison.pairs)


def test_every_refused_difference_is_named_at_once(tmp_path: Path, one: Path):
    """A user should not find them one by one; the command to go on is in the sentence."""
    second = changed(one, tmp_path / "two", **CHANGES["dtype"], **CHANGES["acceptance"])
    with pytest.raises(InputError, match=r"they also differ in acceptance; .* --allow dtype,acceptance "):
        compare([one, second])
    with pytest.raises(InputError, match="--allow dtype,acceptance "):
        compare([one, second], allow=["dtype"])


def test_a_device_is_compared_as_it_was_chosen(tmp_path: Path, one: Path):
    """``auto`` without a GPU is the CPU, and no difference."""
    auto = changed(one, tmp_path / "auto", config={"target": {"device": "auto", "dtype": "bfloat16"}})
    assert differences(read_runs([one, auto])) == ()
    cuda = changed(one, tmp_path / "cuda", config={"target": {"device": "cuda:1", "dtype": "auto"}})
    assert [found.values[1] for found in differences(read_runs([one, cuda]))] == [{"device": "cuda"}]


def test_an_unknown_name_cannot_be_allowed(one: Path):
    """A misspelt leave would be no leave, or one for nothing."""
    with pytest.raises(InputError, match="did you mean dtype"):
        compare([one], allow=["dtyp"])
    with pytest.raises(InputError, match="choose from nodes, draft_weights"):
        compare([one], equal=["parameters"])


def test_baselines_that_ran_at_other_speeds_are_pointed_out(tmp_path: Path, one: Path):
    """Guards BM-07: a machine that was busier in one run, which no field of the summary shows."""
    comparison = compare([one, made_run(tmp_path / "two", TWO, slow=1.5)])
    (notice,) = comparison.notices
    assert notice.startswith("The baseline of run 2 ran at 0.67 times")
    ratios = [pair["ratio_of_totals"] for pair in comparison.pairs if "ngram" in pair["second"]]
    assert ratios == [pytest.approx(1.0)]
    for pair in comparison.pairs:
        across = ("run 1" in pair["first"]) != ("run 1" in pair["second"])
        faster = 1.5 if "run 1" in pair["first"] else 1 / 1.5
        assert pair["baseline_ratio"] == (pytest.approx(faster) if across else None)


def test_other_prompts_of_the_same_id_are_left_out(tmp_path: Path, one: Path):
    """Allowed runs over other prompt files share only the requests that are the same tokens, and the count says so."""
    rows = made_rows(TWO)
    for row in rows:
        if row["question_id"] < 5:
            row["prompt_ids"] = [9, *row["prompt_ids"]]
    two = write_run(tmp_path / "two", TWO, rows, **CHANGES["prompts"])
    comparison = compare([one, two], allow=["prompts"])
    assert any("share 13 requests" in notice and "(7 have the same id" in notice for notice in comparison.notices)
    prompts = {pair["prompts"] for pair in comparison.pairs if "prompts" in pair["unlike"]}
    assert prompts == {10}


def test_a_later_turn_of_another_answer_is_left_out(tmp_path: Path, one: Path):
    """A second turn continues the baseline's own first answer, which seed or rounding change; the first turn counts."""
    rows = made_rows(TWO)
    for row in rows:
        if row["turn"] == 1:
            row["prompt_ids"] = [9, *row["prompt_ids"]]
    comparison = compare([one, write_run(tmp_path / "two", TWO, rows)])
    assert any("share 15 requests" in notice and "(5 have the same id" in notice for notice in comparison.notices)
    across = [pair for pair in comparison.pairs if pair["baseline_ratio"] is not None]
    assert {(pair["prompts"], pair["requests"]) for pair in across} == {(15, 15)}


def test_failed_requests_take_no_part_and_are_counted(tmp_path: Path):
    """A prompt that failed on one side is missing on both sides of its pairs, and the notice says how many failed."""
    rows = [row for row in made_rows(TWO) if (row["strategy"], row["question_id"]) != ("ngram", 4)]
    rows.append(made_row("ngram", QUICK, 4, np.random.default_rng(0), status="failed"))
    comparison = compare([write_run(tmp_path / "one", TWO, rows)])
    assert [pair["prompts"] for pair in comparison.pairs] == [14]
    assert [entry["prompts"] for entry in comparison.entries] == [15, 14]
    assert "Run 1: 1 requests failed" in comparison.notices[0]


def test_budgets_that_differ_are_refused_when_they_are_to_be_equal(tmp_path: Path):
    """Equal budget: every strategy that drafts offers trees of the same size; the baseline, which drafts none, may."""
    with pytest.raises(InputError, match=r"--equal='nodes': the budgets differ \(ngram 5, deep 9\)"):
        compare([made_run(tmp_path / "three", THREE)], equal=["nodes"])
    same = {**TWO, "other": replace(QUICK, accepts=0.3)}
    comparison = compare([made_run(tmp_path / "same", same)], equal=["nodes", "draft_weights"])
    assert comparison.equal_budget == ("nodes", "draft_weights")


# --- labels ----------------------------------------------------------------------------------------------------------


def test_strategies_of_one_name_get_labels_of_their_own(tmp_path: Path):
    """Two rows under one name would be read as one strategy: parameters tell them apart, else the number of the run."""
    runs = read_runs(
        [
            made_run(tmp_path / "a", TWO),
            made_run(tmp_path / "b", {**TWO, "ngram": replace(QUICK, config={"k": 8})}),
            made_run(tmp_path / "c", {**TWO, "ngram": replace(QUICK, config={"k": 8}), "other": QUICK}),
        ]
    )
    labels = entry_labels(runs)
    assert [labels[index, "ngram"] for index in range(3)] == ["ngram k=4", "ngram k=8 [run 2]", "ngram k=8 [run 3]"]
    assert labels[1, "autoregressive"] == "autoregressive [run 2]"
    assert labels[2, "other"] == "other"
    assert len(set(labels.values())) == len(labels)


def test_a_single_run_keeps_its_names(tmp_path: Path):
    """Nothing is added where nothing has to be told apart."""
    assert list(entry_labels(read_runs([made_run(tmp_path / "a", THREE)])).values()) == list(THREE)


def test_values_in_words():
    """What a reader sees of a hash, of nothing and of several fields."""
    assert plain("ab" * 32) == "abababababab"
    assert plain({"cpu": "x", "gpu": None}) == "cpu=x, gpu=none"


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda folder: (folder / "summary.json").unlink(),
            "go on with its own options and hydra.run.dir=",
        ),
        (lambda folder: (folder / "config.yaml").unlink(), "holds no config.yaml"),
        (lambda folder: (folder / "summary.json").write_text("{"), "summary.json is damaged"),
        (lambda folder: (folder / "summary.json").write_text("[1]"), "schema version None"),
        (lambda folder: (folder / "config.yaml").write_text("a: [1"), "config.yaml is damaged"),
        (lambda folder: (folder / "config.yaml").write_text("- 1"), "states no settings"),
        (lambda folder: _edit(folder, schema_version=1), "schema version 1, and this program reads 4"),
        (lambda folder: _edit(folder, repeats=0), r"breaks its schema at \$.repeats"),
        (lambda folder: _cut(folder), "are not of one run: they disagree about requests of"),
        (lambda folder: (folder / "requests.jsonl").write_text("no row\n"), "line 1"),
    ],
)
def test_a_damaged_run_is_refused_by_name(tmp_path: Path, one: Path, damage: Any, words: str):
    """One sentence with the folder or the file in it, for everything that can be wrong with a run folder."""
    folder = changed(one, tmp_path / "run")
    damage(folder)
    with pytest.raises(InputError, match=words):
        read_run(folder)


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _cut(folder: Path) -> None:
    path = folder / "requests.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def test_folders_that_cannot_be_compared_are_refused(tmp_path: Path, one: Path):
    """None, one that is not there, one given twice, and the folder of a whole sweep."""
    folder = changed(one, tmp_path / "sweep" / "0")
    for folders, words in (
        ([], "at least one"),
        ([tmp_path / "absent"], "no such folder"),
        ([folder, folder / ".." / "0"], "given twice"),
        ([folder.parent], "folder of several runs"),
        ([tmp_path], "holds no summary.json, requests.jsonl, config.yaml"),
    ):
        with pytest.raises(InputError, match=words):
            read_runs(folders)
