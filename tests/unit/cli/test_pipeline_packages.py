"""Which packages `millstream pipeline run` asks for."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from millstream.cli.exit_code import ExitCode
from millstream.pipelines.runtime import spark_session
from millstream_testing.command import call_command

NOWHERE = ("--brokers", "127.0.0.1:1", "--timeout", "1")


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages that are not installed."""
    names: set[str] = set()
    monkeypatch.setattr(spark_session, "find_spec", lambda name: None if name in names else find_spec(name))
    return names


def test_a_dry_run_of_landing_asks_for_what_it_uses(missing: set[str]) -> None:
    run = ("pipeline", "run", "land", "orders", "--lake", "lake", *NOWHERE)
    missing.add("pandas")
    assert call_command([*run, "--dry-run"]).code == ExitCode.UNREACHABLE, "it gets as far as the broker"
    refused = call_command([*run, "--once"])
    assert (refused.code, "pipelines run on Spark" in refused.err, "(pandas)" in refused.err) == (1, True, True)
    missing.add("deltalake")
    refused = call_command([*run, "--dry-run"])
    assert (refused.code, "starts no Spark" in refused.err, "(deltalake)" in refused.err) == (1, True, True)
