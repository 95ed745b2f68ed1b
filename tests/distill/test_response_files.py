"""Responses on disk: nothing lost, nothing doubled, and a packed file that says what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specdec_lab.distill.response_files import (
    MANIFEST,
    PACKED,
    RESPONSES,
    Response,
    ResponseLog,
    check_folder,
    clear_folder,
    pack,
    read_responses,
    read_rows,
    write_manifest,
)
from specdec_lab.errors import InputError


def row(
    question_id: int | str = 1, turn: int = 0, sample: int = 0, ids: tuple[int, ...] = (5, 6), **more: Any
) -> Response:
    return Response(question_id=question_id, turn=turn, sample=sample, response_ids=ids, finished=True, **more)


ROWS = (row(3), row(1, 1, 2, (65535,)), row(1, 0, 0, (0, 1, 2)), row(12, 0, 1))


def folder_of(path: Path, rows: tuple[Response, ...], manifest: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    write_manifest(path, manifest or {"target": {"name": "tiny"}})
    with ResponseLog(path / RESPONSES, resume=False) as log:
        for one in rows:
            log.append(one)
    return path


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_row_is_on_disk_before_the_next_one(tmp_path: Path):
    """A kill -9 loses no finished row: each is handed to the system at once."""
    with ResponseLog(tmp_path / "rows.jsonl", resume=False) as log:
        for count, one in enumerate(ROWS, start=1):
            log.append(one)
            assert read_rows(tmp_path / "rows.jsonl") == ROWS[:count]
        with pytest.raises(ValueError, match="is there already"):
            log.append(ROWS[0])


def test_a_torn_line_is_dropped_and_the_log_goes_on(tmp_path: Path):
    """What a kill left of a row disappears; the row after it starts a line of its own."""
    path = folder_of(tmp_path / "run", ROWS[:2]) / RESPONSES
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"question_id":3,"turn":0,"sam')
    assert read_rows(path) == ROWS[:2]
    with ResponseLog(path, resume=True) as log:
        log.append(ROWS[2])
    assert read_rows(path) == ROWS[:3]
    path.write_bytes(whole[:-1])  # only the line end is missing
    assert read_rows(path) == ROWS[:2]


def test_without_resume_a_log_starts_empty(tmp_path: Path):
    path = folder_of(tmp_path / "run", ROWS) / RESPONSES
    with ResponseLog(path, resume=False) as log:
        assert not log.rows
    assert read_rows(path) == ()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b'{"question_id":1,"response_ids":[],"finished":true}',
        b'{"question_id":1,"response_ids":[-1],"finished":true}',
        b'{"question_id":1,"response_ids":[1.5],"finished":true}',
        b'{"question_id":1,"response_ids":[1],"finished":1}',
        b'{"question_id":1,"response_ids":[1]}',
        b'{"question_id":1,"response_ids":[1],"finished":true,"colour":"red"}',
        b'{"question_id":3,"response_ids":[1],"finished":true}',
    ],
)
def test_any_other_damage_is_named_by_line(tmp_path: Path, line: bytes):
    """Guards TD-11: only a torn last line may be dropped in silence; the last case is a row that is there twice."""
    path = folder_of(tmp_path / "run", ROWS[:1]) / RESPONSES
    path.write_bytes(
        path.read_bytes() + line + b"\n" + path.read_bytes().replace(b'"question_id":3', b'"question_id":4')
    )
    with pytest.raises(InputError, match=r"responses.jsonl='line 2'"):
        read_rows(path)


def test_the_short_shape_is_read(tmp_path: Path):
    """Rows without turn and sample are greedy answers to first turns."""
    path = tmp_path / "greedy.jsonl"
    path.write_text('{"question_id":6986,"response_ids":[34355,28],"finished":true}\n')
    found = read_responses(path)
    assert found.manifest is None
    assert found.responses == (row(6986, ids=(34355, 28)),)


# --- packed ----------------------------------------------------------------------------------------------------------


def test_a_packed_file_gives_the_same_responses(tmp_path: Path):
    folder = folder_of(tmp_path / "run", ROWS)
    path = pack(folder)
    found, packed = read_responses(folder), read_responses(path)
    assert {one.key: one for one in packed.responses} == {one.key: one for one in found.responses}
    assert packed.manifest is not None
    assert packed.manifest["target"] == {"name": "tiny"}
    counts = {"rows": 4, "finished": 4, "response_tokens": 8, "rows_per_sample": {"0": 2, "1": 1, "2": 1}}
    assert packed.manifest["counts"] == counts
    tensors = load_file(path)
    assert tensors["response_ids"].dtype == np.uint16
    assert tensors["question_id"].tolist() == [1, 1, 3, 12]


def test_the_order_of_answering_does_not_change_the_file(tmp_path: Path):
    """A resumed run finishes its answers in another order, and gives the same bytes."""
    first, second = folder_of(tmp_path / "a", ROWS), folder_of(tmp_path / "b", ROWS[::-1])
    assert pack(first).read_bytes() == pack(second).read_bytes()


def test_large_ids_texts_as_ids_and_own_prompts_are_kept(tmp_path: Path):
    rows = (row("self/0", ids=(65536, 1), prompt="Why is it so?"), row("b", 1), row(2**40), row(7))
    path = pack(folder_of(tmp_path / "run", rows))
    assert load_file(path)["response_ids"].dtype == np.uint32
    assert {one.key: one for one in read_responses(path).responses} == {one.key: one for one in rows}


def test_a_folder_is_read_by_its_lines_or_by_its_packed_file(tmp_path: Path):
    folder = folder_of(tmp_path / "run", ROWS[:1])
    pack(folder)
    with ResponseLog(folder / RESPONSES, resume=True) as log:
        log.append(ROWS[1])
    assert len(read_responses(folder).responses) == 2
    assert read_responses(folder / RESPONSES).manifest == {"target": {"name": "tiny"}}
    (folder / RESPONSES).unlink()
    assert len(read_responses(folder).responses) == 1


def test_a_damaged_or_foreign_file_is_one_sentence(tmp_path: Path):
    """Guards SE-01: only safetensors and JSON are opened, and what they hold is checked."""
    folder = folder_of(tmp_path / "run", ROWS)
    path = pack(folder)
    good = path.read_bytes()
    for data in (good[:-3], good[:20], b"", b"\x80\x04K\x01."):
        path.write_bytes(data)
        with pytest.raises(InputError, match="damaged"):
            read_responses(path)
    save_file({"weights": np.zeros(3)}, path)
    with pytest.raises(InputError, match="format is not"):
        read_responses(path)
    with pytest.raises(InputError, match=r"data.responses='none.safetensors': there is no such file"):
        read_responses("none.safetensors")
    (folder / RESPONSES).unlink()
    (folder / PACKED).unlink()
    with pytest.raises(InputError, match="there is no such file"):
        read_responses(folder)


def test_packed_columns_of_different_lengths_are_refused(tmp_path: Path):
    path = pack(folder_of(tmp_path / "run", ROWS))
    stated = {"specdec_lab": json.dumps({"format": "specdec_lab.responses.1"})}
    for name in ("offsets", "turn", "response_ids"):
        tensors = load_file(path)
        tensors[name] = tensors[name][:-1]
        save_file(tensors, tmp_path / "cut.safetensors", metadata=stated)
        with pytest.raises(InputError, match="damaged"):
            read_responses(tmp_path / "cut.safetensors")


# --- the folder ------------------------------------------------------------------------------------------------------


def test_a_used_folder_needs_a_decision(tmp_path: Path):
    """Answers that took hours are never mixed or lost without a word."""
    for folder in (tmp_path / "absent", tmp_path):
        for flags in ({}, {"resume": True}, {"overwrite": True}):
            check_folder(folder, **{"resume": False, "overwrite": False, **flags})
    folder = folder_of(tmp_path / "run", ROWS)
    with pytest.raises(InputError, match=r"hydra.run.dir=.*resume=true, overwrite=true or give another"):
        check_folder(folder, resume=False, overwrite=False)
    with pytest.raises(InputError, match="give one of the two"):
        check_folder(folder, resume=True, overwrite=True)
    check_folder(folder, resume=True, overwrite=False)
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"also holds thesis.tex"):
        check_folder(folder, resume=False, overwrite=True)
    clear_folder(folder)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    with pytest.raises(InputError, match=f"holds no {MANIFEST}"):
        check_folder(folder, resume=True, overwrite=False)
