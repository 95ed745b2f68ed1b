"""From responses and conversations to ids and marks: what is learnt is what was answered, to what was asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from specdec_lab.bench.prompts import Prompt
from specdec_lab.chat import render_chat
from specdec_lab.config import validate
from specdec_lab.distill.batch import Example
from specdec_lab.distill.conversation_files import Conversation
from specdec_lab.distill.fingerprints import file_sha256, template_sha256, tokenizer_fingerprint
from specdec_lab.distill.rendering import (
    check_template,
    example_from_conversation,
    examples_from_responses,
    template_opening,
)
from specdec_lab.distill.response_files import Response, ResponseLog, write_manifest
from specdec_lab.distill.responses import answer_text, turn_messages
from specdec_lab.distill.selection import with_prompts_learnt, without_doubles
from specdec_lab.distill.training_data import DataSettings, TrainingData, load_examples, read_data
from specdec_lab.errors import InputError
from specdec_lab.targets.tiny import CHAT_TEMPLATE, SPECIALS, build_tokenizer

TOKENIZER = build_tokenizer()
BOS, EOS = SPECIALS.index("<s>"), SPECIALS.index("</s>")
REWRITES = CHAT_TEMPLATE.replace("message['content'] }}", "(message['content'] if loop.last else '...') }}")


def ids_of(text: str, *, end: bool = True) -> tuple[int, ...]:
    return (*TOKENIZER(text, add_special_tokens=False)["input_ids"], *([EOS] if end else []))


def response(question_id: int | str, text: str, turn: int = 0, sample: int = 0, *, end: bool = True) -> Response:
    ids = ids_of(text, end=end)
    return Response(question_id=question_id, turn=turn, sample=sample, response_ids=ids, finished=end)


def supervised(example: Example) -> list[tuple[int, ...]]:
    """Return the runs of supervised ids."""
    runs: list[list[int]] = []
    before = False
    for token, mark in zip(example.ids, example.supervised, strict=True):
        if mark and not before:
            runs.append([])
        if mark:
            runs[-1].append(token)
        before = mark
    return [tuple(run) for run in runs]


# --- responses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [True, False])
def test_a_response_is_learnt_in_exactly_its_ids(end: bool):
    """Guards TD-01, TD-16, TV-05: the prompt as rendered, with one BOS, then exactly the response, EOS as it has it."""
    rows = [response(1, "the other", end=end)]
    (example,) = examples_from_responses([Prompt(1, "talk", ("the one",))], rows, TOKENIZER, 99)
    context = render_chat(TOKENIZER, [{"role": "user", "content": "the one"}])
    assert example.ids == (*context, *rows[0].response_ids)
    assert example.supervised == (False,) * len(context) + (True,) * len(rows[0].response_ids)
    assert example.ids.count(BOS) == 1
    assert example.ids.count(EOS) == int(end)
    assert example.key == "1/0/0"


def test_ids_that_no_tokenizer_would_write_are_kept():
    """The target can spell a text in other tokens than the tokenizer: those are what it said."""
    letters = tuple(token for letter in "the" for token in ids_of(letter, end=False))
    assert letters != ids_of("the", end=False)
    row = Response(question_id=1, response_ids=letters, finished=False)
    (example,) = examples_from_responses([Prompt(1, "talk", ("a",))], [row], TOKENIZER, 99)
    assert supervised(example) == [letters]


def test_all_answers_of_a_conversation_are_learnt_and_nothing_between_them():
    """Guards TD-14: three turns, three runs of marks, each exactly an answer; one that its budget cut has no EOS."""
    prompt = Prompt(5, "talk", ("the one", "and then", "so?"))
    rows = [response(5, "first", 0), response(5, "second", 1, end=False), response(5, "third", 2)]
    (example,) = examples_from_responses([prompt], rows, TOKENIZER, 99)
    assert supervised(example) == [row.response_ids for row in rows]
    last = render_chat(TOKENIZER, turn_messages(prompt, ["first", "second"]))
    assert example.ids == (*last, *rows[2].response_ids)
    assert example.key == "5/2/0"


def test_an_earlier_answer_in_other_tokens_gets_an_example_of_its_own():
    """Each response is learnt once, behind the very context that it was given in."""
    prompt = Prompt(5, "talk", ("the one", "and then"))
    letters = (*(token for letter in "the" for token in ids_of(letter, end=False)), EOS)
    first = Response(question_id=5, response_ids=letters, finished=True)
    rows = [first, response(5, "second", 1)]
    alone, chained = examples_from_responses([prompt], rows, TOKENIZER, 99)
    assert supervised(alone) == [letters]
    assert alone.ids[: -len(letters)] == render_chat(TOKENIZER, turn_messages(prompt, []))
    assert supervised(chained) == [rows[1].response_ids]
    assert chained.ids[: -len(rows[1].response_ids)] == render_chat(TOKENIZER, turn_messages(prompt, ["the"]))
    assert {alone.key, chained.key} == {"5/0/0", "5/1/0"}


def test_drawn_answers_follow_the_greedy_ones():
    """Guards TD-16: a drawn answer to a later turn stands behind the greedy answers that it was drawn after."""
    prompt = Prompt(5, "talk", ("the one", "and then"))
    rows = [response(5, "first"), response(5, "drawn", 0, 1), response(5, "second", 1), response(5, "late", 1, 1)]
    found = {one.key: one for one in examples_from_responses([prompt], rows, TOKENIZER, 99)}
    assert found.keys() == {"5/1/0", "5/0/1", "5/1/1"}
    assert supervised(found["5/1/1"]) == [ids_of("late")]
    assert found["5/1/1"].ids[: -len(ids_of("late"))] == render_chat(TOKENIZER, turn_messages(prompt, ["first"]))
    with pytest.raises(InputError, match=r"data.responses=5: there is no greedy answer to its turn 0"):
        examples_from_responses([prompt], rows[2:], TOKENIZER, 99)


def test_a_template_that_shortens_history_still_gives_what_was_asked():
    """Guards TD-16: then each answer is an example of its own, behind the context that the target saw."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = REWRITES
    prompt = Prompt(5, "talk", ("the one", "and then"))
    found = examples_from_responses([prompt], [response(5, "first"), response(5, "second", 1)], tokenizer, 99)
    assert [supervised(one) for one in found] == [[ids_of("first")], [ids_of("second")]]
    for one, answers in zip(found, ([], ["first"]), strict=True):
        context = render_chat(tokenizer, turn_messages(prompt, answers))
        assert one.ids[: len(context)] == context


# --- conversations as they are ----------------------------------------------------------------------------------------


def conversation(*texts: str, system: str | None = None) -> Conversation:
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    first = [] if system is None else [{"role": "system", "content": system}]
    return Conversation(4, "talk.jsonl, line 4", (*first, *messages))


TALK = ("the one", "is here", "and the other", "is not")


@pytest.mark.parametrize("system", [None, "Be short."])
def test_every_answer_is_learnt_with_the_token_that_ends_it(system: str | None):
    """Guards TD-14, TD-16, TV-05: what stands before each answer is what the renderer gives for a prompt."""
    one = conversation(*TALK, system=system)
    example = example_from_conversation(one, TOKENIZER, 200)
    assert example is not None
    assert supervised(example) == [ids_of("is here"), ids_of("is not")]
    assert example.ids[-1] == EOS
    assert example.ids.count(BOS) == 1
    for at, message in enumerate(one.messages):
        if message["role"] == "assistant":
            context = render_chat(TOKENIZER, one.messages[:at])
            assert example.ids[: len(context)] == context
            assert example.supervised[len(context)]
            assert not example.supervised[len(context) - 1]


def test_an_answer_that_runs_into_the_template_is_no_example():
    """Guards TD-16: where ``t`` of the template and ``h`` of the answer become one token, no prompt ends before it."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("'<' + message['role'] + '>'", "'<' + message['role'] + '>t'")
    tokenizer.chat_template = tokenizer.chat_template.replace("'<assistant>'", "'<assistant>t'")
    check_template(tokenizer)
    assert example_from_conversation(conversation("a", "he"), tokenizer, 99) is None
    assert example_from_conversation(conversation("a", "b"), tokenizer, 99) is not None


def test_a_template_that_suits_no_conversation_is_refused(tmp_path: Path):
    """Guards TD-16: one that rewrites what was said, or does not end an answer."""
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": list(conversation(*TALK).messages)}) + "\n")
    settings = DataSettings(conversations=(str(path),), validation_share=0)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = REWRITES
    with pytest.raises(InputError, match=r"data.conversations=None: .*renders earlier turns differently"):
        load_examples(settings, tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    with pytest.raises(InputError, match=r"talk.jsonl, line 1='assistant': .*no special token"):
        load_examples(settings, tokenizer)


# --- whole data sets --------------------------------------------------------------------------------------------------


def prompts_file(folder: Path, count: int, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    rows = [{"question_id": n, "category": "talk", "turns": [f"the one and {n} of {name}"]} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def responses_folder(
    folder: Path, prompts: Path, rows: Sequence[Response], tokenizer: PreTrainedTokenizerFast = TOKENIZER
) -> Path:
    folder.mkdir()
    manifest = {
        "target": {"name": "tiny"},
        "prompts": [{"name": prompts.name, "sha256": file_sha256(prompts), "prompts": 1}],
        "tokenizer_sha256": tokenizer_fingerprint(tokenizer),
        "chat_template_sha256": template_sha256(tokenizer),
    }
    write_manifest(folder, manifest)
    with ResponseLog(folder / "responses.jsonl", resume=False) as log:
        for row in rows:
            log.append(row)
    return folder


def answers(count: int, samples: int = 2) -> list[Response]:
    return [response(n, f"answer {n} {sample}", 0, sample) for n in range(count) for sample in range(samples)]


def load(tmp_path: Path, tokenizer: PreTrainedTokenizerFast = TOKENIZER, **settings: Any) -> TrainingData:
    """Load a folder ``run`` of answers to ``prompts.jsonl``."""
    paths = {"responses": (str(tmp_path / "run"),), "prompts": (str(tmp_path / "prompts.jsonl"),)}
    return load_examples(validate(DataSettings, {**paths, **settings}, "data"), tokenizer)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with two answers to each of 60 questions."""
    prompts = prompts_file(tmp_path, 60)
    responses_folder(tmp_path / "run", prompts, answers(60))
    return tmp_path


def question(example: Example) -> str:
    return example.key.split("/")[0]


def test_no_question_is_trained_and_validated_on(run: Path):
    """All answers to a question are on one side, and less data moves none of them to the other."""
    training, validation, report = load(run, validation_share=0.2)
    assert len(training) + len(validation) == 120
    assert 4 <= len(validation) <= 48
    assert not {question(one) for one in training} & {question(one) for one in validation}
    assert (report.rows, report.validation_rows) == (len(training), len(validation))
    assert report.response_tokens == sum(one.labels for one in training)
    assert report.sources[0].made_by == {"name": "tiny"}
    few = load(run, validation_share=0.2, limit_tokens=100)
    assert few.validation == validation
    assert load(run, validation_share=0.2, seed=1).validation != validation
    assert not load(run, validation_share=0).validation


def test_a_smaller_limit_takes_a_subset(run: Path):
    """Learning curves compare like with like: the first texts of 200 tokens are those of 400 tokens too, mixed."""
    small, large, whole = (load(run, limit_tokens=limit).training for limit in (200, 400, None))
    assert small == large[: len(small)]
    assert large == whole[: len(large)]
    assert 200 <= sum(one.labels for one in small) < 200 + max(one.labels for one in whole)
    numbers = [int(question(one)) for one in whole]
    assert numbers != sorted(numbers)
    assert load(run, seed=1).training != whole


def test_a_row_without_a_label_is_skipped_and_counted(run: Path):
    """Guards TD-08: a prompt as long as ``max_tokens`` leaves nothing to learn; if all are, that is one sentence."""
    context = [
        len(render_chat(TOKENIZER, [{"role": "user", "content": f"the one and {n} of prompts.jsonl"}]))
        for n in range(60)
    ]
    fits = sum(length < max(context) for length in context)
    assert 0 < fits < 60
    training, _, report = load(run, max_tokens=max(context), validation_share=0)
    assert {len(one.ids) for one in training} == {max(context)}
    assert {question(one) for one in training} == {str(n) for n in range(60) if context[n] < max(context)}
    assert report.skipped["no_labels"] == 2 * (60 - fits)
    with pytest.raises(InputError, match=r"no training example is left \(120 no_labels\).*data.max_tokens=5"):
        load(run, max_tokens=5)


def test_responses_of_another_tokenizer_or_template_are_refused(run: Path):
    """Guards TD-16, TV-02: before anything is learnt from ids that mean something else."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE + " "
    with pytest.raises(InputError, match=r"data.responses='responses.jsonl': .*another chat template"):
        load(run, tokenizer)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(InputError, match=r"data.responses='responses.jsonl': .*another tokenizer"):
        load(run, tokenizer)


def test_responses_are_joined_to_the_prompts_that_they_answer(run: Path):
    """Guards TD-16: an edited or missing file is refused, and equal ids of another file are not taken for it."""
    other = prompts_file(run, 60, "other.jsonl")
    both = (str(other), str(run / "prompts.jsonl"))
    assert load(run, prompts=both).training == load(run).training
    with pytest.raises(InputError, match=r"data.prompts=\['other.jsonl .*answers the prompts of prompts.jsonl"):
        load(run, prompts=(str(other),))
    bare = run / "bare.jsonl"
    bare.write_bytes((run / "run" / "responses.jsonl").read_bytes())
    assert len(load(run, responses=(str(bare),), prompts=(str(other),)).training) > 100
    with pytest.raises(InputError, match=r"data.prompts=0: .*several files"):
        load(run, responses=(str(bare),), prompts=both)
    with pytest.raises(InputError, match=r"data.prompts=59: .*no file in data.prompts has"):
        load(run, responses=(str(bare),), prompts=(str(prompts_file(run, 59, "few.jsonl")),))
    with pytest.raises(InputError, match="nothing to train on"):
        load(run, responses=(), prompts=())


def test_what_another_row_holds_is_learnt_once(run: Path):
    """Two runs over the same prompts: equal answers, and answers that were cut earlier, are not counted twice."""
    cut = [Response(question_id=n, response_ids=ids_of(f"answer {n} 0")[:3], finished=False) for n in range(30)]
    differs = [response(n, "something else") for n in range(30, 33)]
    responses_folder(run / "old", run / "prompts.jsonl", [*cut, *differs, *answers(40)[70:]])
    both = (str(run / "old"), str(run / "run"))
    training, validation, report = load(run, responses=both)
    assert len(training) + len(validation) == 120 + 3
    assert report.skipped == {"doubled": 40}
    assert len({one.key for one in training}) == len(training)
    assert len(report.sources) == 2


def test_equal_texts_with_other_marks_are_two():
    ids = (1, 2, 3, 4)
    first = Example("a", ids, (False, True, True, True))
    second = Example("b", ids, (False, True, False, True))
    shorter = Example("c", ids[:3], (False, True, True))
    kept = without_doubles([("q", shorter), ("q", first), ("q", second)])
    assert {one.key for _, one in kept} == {"a", "b"}


def test_prompts_can_be_learnt_too_but_not_what_the_template_opens_every_text_with():
    first = Example("a", (1, 7, 7, 4, 5, 6), (False, False, False, False, True, True))
    other_system = Example("b", (1, 8, 8, 9), (False, False, False, True))
    marks = [example.supervised for example in with_prompts_learnt([first, other_system], (1, 7, 7))]
    assert marks == [(False,) * 3 + (True,) * 3, (False,) + (True,) * 3]
    assert with_prompts_learnt([first], ())[0].supervised == (False,) + (True,) * 5  # the first has nothing before it
    assert first.labels == 2  # the examples themselves, which vocabulary and validation are made of, stay as they are


def test_the_opening_of_a_template_is_what_all_texts_share():
    opening = template_opening(TOKENIZER)
    assert opening[0] == BOS
    for text in ("the one", "another"):
        assert render_chat(TOKENIZER, [{"role": "user", "content": text}])[: len(opening)] == opening
    whole = render_chat(TOKENIZER, [{"role": "user", "content": "one"}])
    assert len(opening) < len(whole)


def test_leaks_are_refused_or_left_out_with_their_answers(run: Path):
    bench = run / "bench.jsonl"
    bench.write_text('{"question_id": 81, "category": "qa", "turns": ["The one, and 7 of prompts.jsonl!"]}\n')
    talk = run / "talk.jsonl"
    rows = [conversation("the one and 7 of prompts jsonl", "b"), conversation("a", "b")]
    talk.write_text("".join(json.dumps({"messages": list(one.messages)}) + "\n" for one in rows))
    with pytest.raises(InputError, match=r"data.prompts, answered in .*: .*7 \(bench.jsonl 81"):
        load(run, evaluation=(str(bench),))
    with pytest.raises(InputError, match=r"data.conversations, talk.jsonl='1 of 2 prompts'"):
        load(run, responses=(), conversations=(str(talk),), evaluation=(str(bench),))
    settings = {"evaluation": (str(bench),), "drop_leaks": True, "conversations": (str(talk),)}
    training, validation, report = load(run, **settings)
    assert report.skipped == {"leaks": 3}
    assert not [one for one in (*training, *validation) if one.key.startswith("0:7/")]
    assert len(training) + len(validation) == 119


def test_the_targets_own_prompts_need_no_file(tmp_path: Path):
    row = Response(question_id="self/0", response_ids=ids_of("so"), finished=True, prompt="why is it?")
    path = tmp_path / "own.jsonl"
    path.write_text(row.model_dump_json() + "\n")
    training, _, report = load_examples(DataSettings(responses=(str(path),), validation_share=0), TOKENIZER)
    assert training[0].ids == (*render_chat(TOKENIZER, [{"role": "user", "content": "why is it?"}]), *ids_of("so"))
    assert report.prompts == {}


def test_the_report_is_plain(run: Path):
    report = load(run).report
    stated = json.loads(json.dumps(report.record()))
    assert stated["prompts"] == {"prompts.jsonl": file_sha256(run / "prompts.jsonl")}
    assert stated["tokenizer_sha256"] == tokenizer_fingerprint(TOKENIZER)


def test_the_configuration_states_every_default():
    path = Path(__file__).parents[2] / "specdec_lab" / "conf" / "data" / "default.yaml"
    assert validate(DataSettings, yaml.safe_load(path.read_text()), "data") == DataSettings()
    for field, value in {"max_tokens": 0, "validation_share": 1, "limit_tokens": 0, "seed": -1, "colour": 1}.items():
        with pytest.raises(InputError, match=rf"data.{field}={value}"):
            validate(DataSettings, {field: value}, "data")
    with pytest.raises(InputError, match=r"data.responses='none': there is no such file"):
        read_data(DataSettings(responses=("none",)))


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_the_content():
    """Guards TD-10, TV-02: calls that pad and cut leave it; a swapped pair of ids, a role or a template changes it."""
    tokenizer = build_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["the one", "a"], padding="max_length", truncation=True, max_length=3)
    assert tokenizer_fingerprint(tokenizer) == before == tokenizer_fingerprint(build_tokenizer())
    tokenizer.pad_token, tokenizer.bos_token = tokenizer.bos_token, tokenizer.pad_token
    assert tokenizer_fingerprint(tokenizer) != before
    swapped = json.loads(build_tokenizer().backend_tokenizer.to_str())
    vocabulary = swapped["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    other = build_tokenizer()
    rebuilt = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(swapped)), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    assert tokenizer_fingerprint(rebuilt) != tokenizer_fingerprint(other)
    assert template_sha256(rebuilt) != template_sha256(other)


def test_answers_are_read_without_their_end():
    assert answer_text(TOKENIZER, ids_of("the one"), True) == "the one"
    assert answer_text(TOKENIZER, ids_of("the one", end=False), False) == "the one"
