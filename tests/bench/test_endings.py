"""How a command ends: one exit code, one sentence, whatever stopped it."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable

import pytest
from rich.console import Console

from specdec_lab.command import INTERRUPTED, REFUSED, SUCCESS, concluded, parsed
from specdec_lab.errors import InputError


def ending(work: Callable[[], int]) -> tuple[int, str]:
    stream = io.StringIO()
    return concluded(work, Console(file=stream, width=200)), stream.getvalue()


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


def test_a_mistake_is_one_sentence_and_a_fault_is_not_hidden():
    assert ending(lambda: SUCCESS) == (SUCCESS, "")
    assert ending(lambda: 3) == (3, "")
    assert ending(raising(InputError("k", 0, "give more"))) == (REFUSED, "error: k=0: give more\n")
    assert ending(raising(OSError(28, "No space left"))) == (REFUSED, "error: [Errno 28] No space left\n")
    assert ending(raising(KeyboardInterrupt())) == (INTERRUPTED, "")
    with pytest.raises(ZeroDivisionError):
        ending(raising(ZeroDivisionError()))


def test_options_or_an_exit_code(capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser(prog="some.py")
    parser.add_argument("--number", type=int)
    options = parsed(parser, ["--number", "3"])
    assert isinstance(options, argparse.Namespace)
    assert options.number == 3
    assert parsed(parser, ["--help"]) == SUCCESS
    assert parsed(parser, ["--number", "x"]) == REFUSED
    assert "invalid int value" in capsys.readouterr().err
