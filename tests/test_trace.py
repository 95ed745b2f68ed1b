"""Every output token has one origin, and the drawing says the same as the counters."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from rich.console import Console
from script_runs import run_script
from transformers import PreTrainedTokenizerBase

from specdec_lab.bench.trace import (
    TokenOrigin,
    attribute_tokens,
    most_accepted_round,
    readable,
    target_tokens,
    token_text,
    tokens_of_round,
)
from specdec_lab.bench.trace_command import TraceSettings, plan_trace, trace_answer
from specdec_lab.bench.trace_view import Trace, render_trace, write_html
from specdec_lab.command import plain_config
from specdec_lab.config import register_drafters
from specdec_lab.decode import Generation, Request, Round, speculative_decode
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.drafters.base import Drafter
from specdec_lab.drafters.ngram import NgramDrafter
from specdec_lab.errors import InputError
from specdec_lab.targets.tiny import load_tiny
from tests.sample_tokenizers import byte_fallback, byte_level

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def played(tokens: list[int], parents: list[int], path: tuple[int, ...], bonus: int = 1) -> Round:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return Round(tuple(tokens), tuple(parents), path, max(depths), bonus, 0.01)


def generation(output: list[int], *rounds: Round) -> Generation:
    return Generation(Request((1, 2, 3), 16), tuple(output), "", "length", rounds)


BRANCHED = generation(
    [10, 11, 13, 14, 20, 21],
    played([10, 11, 12, 13, 15], [-1, 0, 0, 1, 2], (1, 3)),  # accepts 11, 13; adds 14
    played([14], [-1], ()),  # adds 20
    played([20, 21, 22], [-1, 0, 1], (1,), bonus=0),  # cut after 21
)


def test_origins_of_a_branched_and_a_cut_round():
    """Guards ST-01 in the trace: what a stop cut off has no origin; a depth is the node's, not its index."""
    assert attribute_tokens(BRANCHED) == [
        TokenOrigin(10, "prefill"),
        TokenOrigin(11, "draft", 0, 1, 1),
        TokenOrigin(13, "draft", 0, 3, 2),
        TokenOrigin(14, "bonus", 0),
        TokenOrigin(20, "bonus", 1),
        TokenOrigin(21, "draft", 2, 1, 1),
    ]
    assert most_accepted_round(BRANCHED.rounds) == 0
    assert attribute_tokens(Generation(Request((1,), 4), error="too long")) == []


def test_the_targets_own_token_is_known_along_the_walk_only():
    """A rejected branch was never followed, so nothing is claimed about it; nor after the cut."""
    origins = attribute_tokens(BRANCHED)
    known = [target_tokens(one, tokens_of_round(origins, at)) for at, one in enumerate(BRANCHED.rounds)]
    assert known == [{0: 11, 1: 13, 3: 14}, {0: 20}, {0: 21}]


def test_rounds_that_do_not_spell_the_answer_are_refused():
    """Guards BM-01 in the trace: a miscounted bonus or path cannot be drawn as if it were right."""
    short = replace(BRANCHED, output_ids=BRANCHED.output_ids[:-1])
    wrong = replace(BRANCHED, output_ids=(10, 12, *BRANCHED.output_ids[2:]))
    longer = replace(BRANCHED, output_ids=(*BRANCHED.output_ids, 9))
    for broken in (short, wrong, longer):
        with pytest.raises(ValueError, match="the rounds spell"):
            attribute_tokens(broken)


@pytest.fixture(scope="module")
def target():
    return load_tiny(device="cpu")


@pytest.mark.parametrize("budget", [1, 2, 7, 60])
@pytest.mark.parametrize("stop", [(), ("e",)])
def test_origins_add_up_to_the_counters_of_real_answers(target, budget: int, stop: tuple[str, ...]):
    """Guards BM-01 and BM-02: per round and in sum, drafts are ``accepted`` and the rest ``bonus``, cut or not."""
    strategies: list[Drafter] = [
        AutoregressiveDrafter(target),
        NgramDrafter(target, branches=3, min_ngram=1, max_nodes=12),
    ]
    for drafter in strategies:
        requests = [Request(tuple(range(5 + at, 25 + at)), budget, stop) for at in range(6)]
        events = speculative_decode(target, drafter, requests)
        for answer in [event.generation for event in events if event.generation is not None]:
            origins = attribute_tokens(answer)
            assert [origin.token for origin in origins] == list(answer.output_ids)
            for at, one in enumerate(answer.rounds):
                sources = [origin.source for origin in tokens_of_round(origins, at)]
                assert sources == ["draft"] * one.accepted + ["bonus"] * one.bonus
            assert len(origins) == 1 + sum(one.accepted + one.bonus for one in answer.rounds)


def texts(tokenizer: PreTrainedTokenizerBase, words: str) -> list[str]:
    return [readable(token_text(tokenizer, token)) for token in tokenizer.encode(words, add_special_tokens=False)]


def test_token_texts_show_spaces_newlines_and_parts_of_characters():
    """A reader must be able to tell a space from nothing and half a character from a broken one."""
    plain = byte_level()
    assert texts(plain, "a b\n\t\x1b") == ["a", "·", "b", "⏎", "⇥", r"\x1b"]
    assert texts(plain, "€") == ["<E2>", "<82>", "<AC>"]
    assert token_text(plain, 10**6) == "<1000000>"
    assert token_text(None, 7) == "<7>"
    pieces = byte_fallback()
    shown_as = {"▁Hello": "·Hello", "▁▁": "··", "lo": "lo", "<0xE6>": "<0xE6>", "<0x0A>": "<0x0A>"}
    vocabulary = pieces.get_vocab()
    assert {name: readable(token_text(pieces, vocabulary[name])) for name in shown_as} == shown_as


def shown(trace: Trace, *, coloured: bool, width: int = 100, round_number: int | None = None) -> str:
    system = "truecolor" if coloured else None
    console = Console(width=width, force_terminal=coloured, color_system=system, no_color=False)
    with console.capture() as capture:
        console.print(render_trace(trace, coloured=coloured, round_number=round_number), crop=False)
    return capture.get()


def lettered(answer: Generation) -> Trace:
    """A trace whose token n is the byte n of a byte-level tokenizer."""
    return Trace(answer, "Say it.", "ngram on tiny", byte_level(), {"rounds": 3, "acceptance_rate": None, "tau": 0.5})


LETTERS = generation(
    [ord(letter) for letter in "abcdef"],
    played([ord(letter) for letter in "abxcy"], [-1, 0, 0, 1, 2], (1, 3)),
    played([ord("d")], [-1], ()),
    played([ord(letter) for letter in "efz"], [-1, 0, 1], (1,), bonus=0),
)


def test_without_colours_brackets_tell_the_origins_apart():
    text = shown(lettered(LETTERS), coloured=False)
    assert "\x1b" not in text
    assert "⟪a⟫⟦b│c⟧de⟦f⟧" in text
    assert re.search(r"▸ 1 +4 +2 +2 +1 +⟦b│c⟧d", text)
    assert re.search(r"\n +3 +2 +2 +1 +0 +⟦f⟧", text)
    assert re.search(r"acceptance_rate +-", text)
    tree = text[text.index("tree of round 1") :]
    assert re.search(r"└── +c +node 3 · depth 2 · ✓ accepted · target says d", tree)
    assert re.search(r"└── +x +node 2 · depth 1 · ✗ rejected *\n", tree)
    assert re.search(r"└── +y +node 4 · depth 2 *\n", tree)


def test_with_colours_every_origin_has_its_own():
    text = shown(lettered(LETTERS), coloured=True)
    assert "⟦" not in text
    styles = {letter: re.search(rf"\x1b\[([0-9;]+)m{letter}\x1b", text) for letter in "abcde"}
    found = [match.group(1) for match in styles.values() if match]
    assert len(found) == len(set(found)) == 5


def test_the_chosen_round_is_drawn_and_a_missing_one_refused():
    assert "tree of round 3" in shown(lettered(LETTERS), coloured=False, round_number=3)
    with pytest.raises(InputError, match=r"round=4: this answer has rounds 1 to 3"):
        shown(lettered(LETTERS), coloured=False, round_number=4)


def test_an_answer_without_rounds_is_shown():
    text = shown(lettered(generation([ord("a")])), coloured=False)
    assert "there was no round" in text
    with pytest.raises(InputError, match="this answer has no round"):
        shown(lettered(generation([ord("a")])), coloured=False, round_number=1)


def test_a_deep_tree_stays_one_line_per_node():
    """A chain of 40 is indented beyond the console's width; its nodes must not be squeezed into a column."""
    drafts = list(range(97, 122)) + list(range(65, 80))
    chain = generation([96, *drafts, 80], played([96, *drafts], list(range(-1, 40)), tuple(range(1, 41))))
    lines = shown(lettered(chain), coloured=False, width=60).splitlines()
    assert sum("✓ accepted · target says" in line for line in lines) == 40


def test_hostile_text_cannot_drive_the_terminal():
    """Control characters of a prompt or an answer are shown, not sent; square brackets are no markup."""
    trace = Trace(generation([27]), "\x1b[2J[bold]x[/bold]", "[red]t[/red]", byte_level(), {})
    text = shown(trace, coloured=False)
    assert "\x1b" not in text
    assert r"\x1b[2J[bold]x[/bold]" in text
    assert "[red]t[/red]" in text


def test_the_page_needs_no_other_file(tmp_path: Path):
    page = tmp_path / "trace.html"
    write_html(lettered(LETTERS), page)
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>")
    assert not re.search(r"https?:|<script|<link|@import|url\(|src=", html)
    assert "⟦" not in html
    assert "background-color: #d3f0dc" in html
    with pytest.raises(InputError, match=r"html=.*cannot be written"):
        write_html(lettered(LETTERS), tmp_path / "missing" / "trace.html")


# --- the command -----------------------------------------------------------------------------------------------------


def composed(*overrides: str) -> dict:
    register_drafters()
    with initialize_config_module("specdec_lab.conf", version_base="1.3"):
        return plain_config(compose("trace", overrides=["target=tiny", *overrides]))


def test_the_file_states_every_setting_with_its_default():
    """A file and its model cannot drift apart."""
    plain = composed()
    assert TraceSettings(**{name: plain[name] for name in TraceSettings.model_fields}) == TraceSettings()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy=ngramm"], r"strategy='ngramm': there is no strategy of that name \(did you mean ngram\?\)"),
        (["strategy=null"], r"strategy=None"),
        (["prompt="], r"prompt=''"),
        (["question_id=nobody"], r"question_id='nobody': .* has no such question"),
        (["question_id=1", "prompt=hi"], r"question_id='1': a prompt is given as well"),
        (["round=0"], r"round=0"),
        (["html=no/such/folder/x.html"], r"html='no/such/folder/x.html'"),
        (["max_new_tokens=0"], r"max_new_tokens=0"),
        (["drafter.ngram.k=0"], r"drafter\.ngram\.k=0"),
    ],
)
def test_bad_input_is_refused_before_a_model_loads(overrides: list[str], message: str):
    with pytest.raises(InputError, match=message):
        plan_trace(composed(*overrides))


def test_a_prompt_with_a_comma_reaches_the_model_whole():
    """Guards CL-01: Hydra must not cut or split the text."""
    plan = plan_trace(composed('prompt="a, b: c"'))
    assert plan.prompt.turns == ("a, b: c",)


def test_the_totals_are_the_benchmarks_counters():
    """No number of the trace is defined a second time, and all agree with the drawn rounds."""
    plan = plan_trace(composed("prompt=the cat and the cat and the cat", "drafter.ngram.min_ngram=1"))
    trace = trace_answer(plan)
    rounds = trace.generation.rounds
    assert trace.totals["output_tokens"] == len(trace.generation.output_ids)
    assert trace.totals["accepted"] == sum(one.accepted for one in rounds)
    accepted, bonus = trace.totals["accepted"], trace.totals["bonus"]
    assert isinstance(accepted, int)
    assert isinstance(bonus, int)
    assert trace.totals["mean_acceptance_length"] == (accepted + bonus) / len(rounds)


def script(*overrides: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_script(folder, "trace.py", "target=tiny", *overrides, path=folder)


def test_the_script_draws_into_a_pipe_and_writes_a_page_where_it_was_started(tmp_path: Path):
    """Guards CL-04: a relative path is the launch folder's, and nothing but the page is written there."""
    done = script("max_new_tokens=12", "drafter.ngram.min_ngram=1", "html=page.html", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert re.search(r"output_tokens +12", done.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_the_script_refuses_in_one_sentence(tmp_path: Path):
    done = script("max_new_tokens=4", "round=99", folder=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(r"error: round=99: this answer has rounds 1 to \d+\n", done.stderr)
    assert done.stdout == ""


LOADERS = """
from functools import wraps
from specdec_lab.targets.tiny import load_tiny

@wraps(load_tiny)
def unreadable(**arguments):
    raise OSError(5, "Input/output error", "weights")

@wraps(load_tiny)
def bad_template(**arguments):
    target = load_tiny(**arguments)
    target.tokenizer.chat_template = "{{ messages[0]['content'] + 1 }}"
    return target
"""


@pytest.mark.parametrize(
    ("loader", "message"), [("unreadable", "Input/output error: 'weights'"), ("bad_template", "messages=.*template")]
)
def test_faults_while_loading_and_rendering_are_one_sentence(tmp_path: Path, loader: str, message: str):
    """A disk that fails and a chat template that raises, whatever it raises, end without a traceback."""
    (tmp_path / "loaders.py").write_text(LOADERS)
    done = script(f"target._target_=loaders.{loader}", folder=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(rf"error: .*{message}.*\n", done.stderr), done.stderr
    assert done.stdout == ""
