"""Rows on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec_lab.bench.prompts import Prompt
from specdec_lab.bench.records import RequestLog, RowKey, failed_row, make_row, read_rows
from specdec_lab.bench.schemas import SCHEMA_VERSION, dumps, fault, load_schema
from specdec_lab.decode import Generation, Request, Round
from specdec_lab.errors import InputError
from specdec_lab.timing import TimeSplit

PROMPT = Prompt(1, "talk", ("hello",))


def row(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A row of two rounds: one accepts 1 of 2 drafts, the other is cut by EOS among its drafts."""
    generation = Generation(
        Request((1, 2), 8),
        output_ids=(5, 6, 7, 8, 2),
        text="hello",
        finish_reason="eos",
        rounds=(
            Round((5, 6, 9), (-1, 0, 1), (1,), proposed=2, bonus=1, seconds=0.2),
            Round((7, 8, 2), (-1, 0, 1), (1, 2), proposed=2, bonus=0, seconds=0.3),
        ),
        time_seconds=TimeSplit(prefill=0.1, verify=0.4, other=0.1),
        decode_elapsed_seconds=0.5,
    )
    return {**make_row(RowKey("ngram", 1, 0, number), PROMPT, generation, 1000), **changes}


def test_a_row_holds_what_the_loop_counted():
    """Guards BM-01 and BM-02: the answer has 1 + accepted + bonus tokens; what EOS cut off is in no counter."""
    made = row()
    assert fault("request", made) is None
    assert made["accepted_per_round"] == [1, 2]
    assert made["bonus_per_round"] == [1, 0]
    assert made["proposed_per_round"] == [2, 2]
    assert made["proposed_nodes_per_round"] == [2, 2]
    assert made["time_seconds"]["total"] == pytest.approx(0.6)
    assert len(made["output_ids"]) == 1 + 3 + 1


def test_failed_requests_have_no_numbers():
    """Null and empty rather than 0; the error is there."""
    made = make_row(RowKey("ngram", 1, 0, 0), PROMPT, Generation(Request((1, 2), 8), error="too long"), 1000)
    assert made == failed_row(RowKey("ngram", 1, 0, 0), PROMPT, (1, 2), "too long")
    assert fault("request", made) is None
    assert (made["status"], made["output_ids"], made["time_seconds"]) == ("failed", [], None)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"status": "perhaps"}, "status"),
        ({"turn": -1}, "turn"),
        ({"output_ids": []}, "output_ids"),
        ({"finish_reason": None}, "finish_reason"),
        ({"colour": "red"}, "colour"),
        ({"time_seconds": {"total": 1.0}}, "time_seconds"),
        ({"exact": "nearly"}, "exact"),
        ({"error": "but it is ok"}, "error"),
    ],
)
def test_a_row_that_breaks_the_schema_is_never_written(changes: dict[str, Any], where: str):
    """The shipped schema is what the writer obeys."""
    with pytest.raises(ValueError, match=where):
        dumps("request", row(**changes))


def test_not_a_number_is_never_written():
    """NaN passes for a number in Python and is none in JSON."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps("request", row(round_seconds=[0.1, float("nan")]))


def test_schemas_say_which_version_they_are():
    """A reader can tell what it reads."""
    assert load_schema("summary")["properties"]["schema_version"]["const"] == SCHEMA_VERSION


def test_rows_are_on_disk_one_by_one(tmp_path: Path):
    """Each row is complete in the file before the next is computed."""
    path = tmp_path / "requests.jsonl"
    with RequestLog(path, resume=False) as log:
        for number in range(3):
            log.append(row(number))
            assert [json.loads(line)["repeat"] for line in path.read_text().splitlines()] == list(range(number + 1))
        with pytest.raises(ValueError, match="there already"):
            log.append(row(0))


def test_a_torn_last_line_is_dropped_and_failed_rows_too(tmp_path: Path):
    """Both are decoded again, so that the file never holds a key twice."""
    path = tmp_path / "requests.jsonl"
    lines = [dumps("request", row(0)), dumps("request", failed_row(RowKey("ngram", 1, 0, 1), PROMPT, (), "x"))]
    path.write_text("\n".join([*lines, dumps("request", row(2))[:40]]))
    before = path.read_text()
    log = RequestLog(path, resume=True)
    assert path.read_text() == before  # there may still be a reason not to go on
    with log:
        assert [key.repeat for key in log.rows] == [0]
        log.append(row(1))
    assert [one["repeat"] for one in read_rows(path)] == [0, 1]


def test_a_complete_last_row_without_line_end_is_kept(tmp_path: Path):
    """The kill came between the row and its line end."""
    path = tmp_path / "requests.jsonl"
    path.write_text(dumps("request", row(0)))
    assert len(read_rows(path)) == 1


@pytest.mark.parametrize("middle", ["{", "[]", '{"strategy": "ngram"}', ""])
def test_a_damaged_line_is_named(tmp_path: Path, middle: str):
    """Only the last line can be torn by a kill; anything else is somebody's edit."""
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join([dumps("request", row(0)), middle, dumps("request", row(1)), ""]))
    with pytest.raises(InputError, match="line 2"):
        read_rows(path)


def test_a_doubled_row_is_named(tmp_path: Path):
    """Counted twice, it would shift every number."""
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(dumps("request", row(0)) + "\n" for _ in range(2)))
    with pytest.raises(InputError, match=r"line 2.*twice"):
        read_rows(path)


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "3"])
def test_every_token_id_is_checked(value: object):
    """The quick way through long lists lets nothing pass that the schema would not."""
    ids = [*range(5000), value]
    assert fault("request", row(prompt_ids=ids[:-1])) is None
    found = fault("request", row(prompt_ids=ids))
    assert found is not None
    assert "prompt_ids[5000]" in found
