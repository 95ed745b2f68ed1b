"""The configuration files against the code that they configure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf
from pydantic import Field

from specdec_lab import conf
from specdec_lab.bench.settings import BASELINE, BenchmarkSettings, choose_strategies, plan_run
from specdec_lab.command import library_message
from specdec_lab.config import available_strategies, check_arguments, locate, register_drafters
from specdec_lab.drafters.base import Drafter
from specdec_lab.errors import InputError


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    register_drafters()
    with initialize_config_module("specdec_lab.conf", version_base="1.3"):
        yield


def composed(*overrides: str) -> Any:
    return OmegaConf.to_container(compose("benchmark", overrides=["target=tiny", *overrides]), resolve=True)


@pytest.mark.parametrize("name", available_strategies())
def test_drafter_file_states_every_parameter_with_its_default(name: str):
    """A file and its class cannot drift apart: same names, same defaults; without a default it is left open."""
    node = composed()["drafter"][name]
    drafter = locate(node.pop("_target_"), name)
    assert issubclass(drafter, Drafter)
    parameters = {key: value for key, value in inspect.signature(drafter).parameters.items() if key != "target"}
    defaults = {key: "???" if value.default is value.empty else value.default for key, value in parameters.items()}
    if "kind" in defaults:  # one class for heads of two kinds, told apart by their files
        assert node["kind"] == name
        defaults["kind"] = name
    if drafter.__module__.endswith(f".{name}") or "kind" in defaults:
        assert node == defaults
    else:  # another choice of values for a strategy that has its own file
        assert set(node) == set(defaults)
        assert node != defaults


def test_a_member_without_a_head_for_the_target_is_refused_before_loading():
    """A hybrid with a head of the default target would fail on another one after it was loaded."""
    node = {**composed()["drafter"], "hybrid_eagle": composed()["drafter"]["hybrid_eagle"]}
    model = composed("target=smollm2_135m")["target"]["model"]
    assert "hybrid_eagle" in choose_strategies(None, node, model)
    assert "hybrid_eagle" not in choose_strategies(None, node, None)
    given = {"hybrid_eagle": {**node["hybrid_eagle"], "settings": {"eagle3": {"head": "folder"}}}}
    assert "hybrid_eagle" in choose_strategies(None, {**node, **given}, None)
    with pytest.raises(InputError, match=r"drafter\.hybrid_eagle\.members=.*one of them drafts with a head") as refused:
        plan_run(composed("strategies=[hybrid_eagle]"))
    assert refused.value.field == "drafter.hybrid_eagle.members"


def test_benchmark_file_states_every_setting_with_its_default():
    """A file and its model cannot drift apart."""
    plain = composed()
    settings = {name: plain[name] for name in BenchmarkSettings.model_fields}
    assert BenchmarkSettings(**settings) == BenchmarkSettings()


def test_every_drafter_file_composes_without_an_edit_elsewhere():
    """A new strategy is found by its file alone; a field of it can be overridden like any other."""
    names = available_strategies()
    assert {BASELINE, "ngram"} <= set(names)
    assert set(composed()["drafter"]) == set(names)
    assert composed("drafter.ngram.k=3")["drafter"]["ngram"]["k"] == 3


def test_files_hold_no_accidental_booleans():
    """``exact: off`` without quotes is false to YAML 1.1; a word that reads as a boolean is quoted."""
    meant = {"resume", "overwrite", "trust_remote_code", "disable_existing_loggers", "text_pool"}
    meant |= {"use_cpu", "drop_leaks", "learn_prompts", "pack", "own_output", "own_embedding", "start_output"}
    meant |= {"context_vocab", "root"}
    folder = Path(str(conf.__path__[0]))
    for path in folder.rglob("*.yaml"):
        for name, value in (yaml.safe_load(path.read_text("utf-8")) or {}).items():
            assert not isinstance(value, bool) or name in meant, path


def test_strategies_default_to_those_that_need_nothing():
    """A parameter that is left open keeps a strategy out of the default, and is named where the strategy is chosen."""
    drafters = {"autoregressive": {}, "medusa": {"checkpoint": "???"}, "ngram": {"k": 8}}
    assert choose_strategies(None, drafters) == ("autoregressive", "ngram")
    assert choose_strategies(["medusa"], drafters) == ("autoregressive", "medusa")
    assert choose_strategies([], drafters) == ("autoregressive",)
    assert choose_strategies(["ngram", "autoregressive"], drafters) == ("autoregressive", "ngram")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["strategies=[ngramm]"],
            r"strategies='ngramm': .*did you mean ngram\?.*choose from autoregressive, draft_model, ",
        ),
        (["strategies=ngram"], r"strategies='ngram': give a list, as strategies=\[ngram\]"),
        (["strategies=[ngram,ngram]"], "strategies='ngram': .*twice"),
        (["drafter.ngram.k=0"], "drafter.ngram.k=0: .*greater than or equal to 1"),
        (["drafter.ngram.k=2.5"], "drafter.ngram.k=2.5: .*integer"),
        (["drafter.ngram.k=true"], "drafter.ngram.k=True: .*not true or false"),
        (["drafter.ngram.min_ngram=9"], "drafter.ngram.min_ngram=9: give at most max_ngram, which is 8"),
        (["+drafter.ngram.q=1"], "drafter.ngram.q=1: there is no field of that name; choose from branches, earlier, k"),
        (["drafter.ngram._target_=os.getcwd"], "drafter.ngram._target_='os.getcwd': this is no Drafter"),
        (["drafter.ngram._target_=no.such.thing"], "drafter.ngram._target_='no.such.thing': it cannot be imported"),
        (["+drafter.ngram._partial_=true"], "drafter.ngram._partial_=True: .*only _target_"),
        (["drafter.ngram=5"], "drafter.ngram=5: this is a group of fields"),
        (["max_new_tokens=0"], "max_new_tokens=0: .*greater than or equal to 1"),
        (["max_new_tokens=abc"], "max_new_tokens='abc': .*integer"),
        (["max_new_tokens=1.5"], "max_new_tokens=1.5: .*integer"),
        (["max_new_tokens=null"], "max_new_tokens=None: .*integer"),
        (["batch_size=true"], "batch_size=True: "),
        (["repeats=-1"], "repeats=-1: .*greater than or equal to 1"),
        (["seed=-1"], "seed=-1: .*greater than or equal to 0"),
        (["exact=on"], "exact='on': .*'off' or 'fixed_shape'"),
        (["typical.epsilon=0"], "typical.epsilon=0.0: "),
        (["typical.delta=-1"], "typical.delta=-1.0: "),
        (["typical=3"], "typical=3: "),
        (["batch_nodes=8", "exact=fixed_shape"], "batch_nodes=8: exact=fixed_shape pads every forward"),
        (["batch_size=3", "batch_nodes=2"], "batch_nodes=2: give at least batch_size, which is 3"),
        (["sampling.bad_words=the"], r"sampling.bad_words='the': give a list, as \[the\]"),
        (["drafter.hybrid.members=[]"], r"drafter.hybrid.members=\[\]: name at least one"),
        (["drafter.hybrid.members=[ngrams]"], "drafter.hybrid.members='ngrams': .*did you mean ngram"),
        (["drafter.hybrid.settings={ngram:{k:0}}"], "drafter.hybrid.settings.ngram.k=0: "),
        (["sampling.repetition_penalty=0"], "sampling.repetition_penalty=0.0: .*above 0"),
        (["sampling.min_new_tokens=-1"], "sampling.min_new_tokens=-1: "),
        (["sampling.min_new_tokens=65"], "sampling.min_new_tokens=65: give at most max_new_tokens, which is 64"),
        (["sampling.bad_words=['']"], "sampling.bad_words='': "),
        (["sampling.bad_words=[[]]"], "sampling.bad_words"),
        (["+sampling.logits_processors=[os.getcwd]"], "sampling.logits_processors.0='os.getcwd': .*callable"),
        (["acceptance=lucky"], "acceptance='lucky': .*'rejection'"),
        (["sampling.temperature=-1"], "sampling.temperature=-1"),
        (["sampling.temperature=1e-320"], "sampling.temperature=.*at least 1e-06"),
        (["threads=100000"], "threads=100000: "),
        (["sampling.temperature=nan"], "sampling.temperature=nan"),
        (["sampling.temperature=warm"], "sampling.temperature='warm': .*number"),
        (["sampling.top_k=0"], "sampling.top_k=0: "),
        (["sampling.top_p=1.5"], "sampling.top_p=1.5: "),
        (["+sampling.typical_p=0.5"], "sampling.typical_p=0.5: there is no field"),
        (["threads=0"], "threads=0: "),
        (["stop=['']"], "stop.0='': "),
        (["+colour=red"], "colour='red': there is no field of that name"),
        (["prompts.path=/no/such/file.jsonl"], "/no/such/file.jsonl"),
        (["prompts.limit=0"], "prompts.limit=0: "),
        (["target.dtype=int3"], "target.dtype='int3': "),
        (["+target.size=3"], "target.size=3: there is no field"),
        (["tracking=wandb", "tracking.mode=carrier_pigeon"], "tracking.mode='carrier_pigeon': "),
    ],
)
def test_wrong_input_is_named_with_value_and_remedy(overrides: list[str], sentence: str):
    """Every mistake is found before a model is loaded; one sentence names the field, the value and the remedy."""
    with pytest.raises(InputError, match=sentence) as refused:
        plan_run(composed(*overrides))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("drafter.eagle.dept=3", r"^drafter.eagle.dept: there is no field .*did you mean depth\?"),
        ("strategis=[ngram]", r"^strategis: there is no field .*did you mean strategies\?"),
        ("drafters.eagle.depth=3", r"^drafters: there is no field .*did you mean drafter\?"),
        ("drafter.ngrm.k=3", r"^drafter.ngrm: there is no field .*did you mean ngram\?"),
    ],
)
def test_a_misspelt_field_is_told_what_was_meant(override: str, sentence: str):
    """Hydra refuses it before any check here runs, and advises to add it as a new field."""
    with pytest.raises(HydraException) as refused:
        composed(override)
    assert re.search(sentence, library_message(refused.value))
    assert "_target_" not in library_message(refused.value)


def test_numbers_and_texts_keep_their_type():
    """Guards CL-02: ``1e-4`` is a number wherever it comes from; an id like ``123E456`` stays text or is refused."""

    def configured(rate: float, run_id: str = "none") -> None: ...

    for text in ("1e-4", "1.0e-4", "1E-4"):
        from_command_line = composed(f"sampling.temperature={text}")["sampling"]["temperature"]
        assert check_arguments(configured, {"rate": from_command_line}, "job")["rate"] == 1e-4
        assert check_arguments(configured, {"rate": yaml.safe_load(f"rate: {text}")["rate"]}, "job")["rate"] == 1e-4
    assert check_arguments(configured, {"rate": 1, "run_id": "123E456"}, "job")["run_id"] == "123E456"
    with pytest.raises(InputError, match=r"job.run_id=inf: .*string"):
        check_arguments(configured, {"rate": 1, "run_id": float("123E456")}, "job")


def test_arguments_are_coerced_and_missing_ones_named():
    """What comes back has the annotated types, defaults included."""

    def load(model: str, sizes: tuple[int, ...] = (1, 2), k: Annotated[int, Field(ge=1)] = 3) -> None: ...

    assert check_arguments(load, {"model": "m", "sizes": [4, 5]}, "target") == {"model": "m", "sizes": (4, 5), "k": 3}
    with pytest.raises(InputError, match=r"target.model=None: field required"):
        check_arguments(load, {}, "target")
    with pytest.raises(InputError, match=r"target.sizes.1='x'"):
        check_arguments(load, {"model": "m", "sizes": [4, "x"]}, "target")
