"""Termination signals to commands."""

from __future__ import annotations

import os
import signal

import pytest

from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.pipeline_run import Stages, unwound_by_sigterm


def test_a_terminated_command_cleans_up(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    put_away = []

    def work() -> None:
        with unwound_by_sigterm(), Stages("land-orders") as stages:
            try:
                stages.show("starting Spark …")
                stages.move("0 messages")
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                # A second signal does not interrupt this.
                os.kill(os.getpid(), signal.SIGTERM)
                put_away.append("all")

    try:
        with pytest.raises(CommandFailed, match="SIGTERM") as failed:
            work()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (put_away, failed.value.exit_code) == (["all"], ExitCode.TERMINATED)
    assert capfd.readouterr().err == "land-orders: starting Spark …\n"


def test_a_command_that_ends_by_itself_restores_the_signal_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with unwound_by_sigterm():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
