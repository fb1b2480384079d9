"""Pipeline flags: the same for declared and manual runs, and none without effect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import typer

from millstream.cli import pipeline
from millstream.cli.exit_code import CommandFailed
from millstream.cli.pipeline_options import Flags
from millstream.cli.pipeline_run import CommandRun, Terminated, _refuse_changes
from millstream.client.admin.pipelines import PipelineStorage
from millstream.core.errors import GroupNotEmpty, InvalidSetting
from millstream.core.pipeline import Pipeline, PipelineKind, check_pipeline
from millstream.core.setting import named_by_caller
from millstream.pipelines.runtime.runner import Tally

LAND, TRANSFORM, ROUTE = PipelineKind.LAND, PipelineKind.TRANSFORM, PipelineKind.ROUTE
DECLARED_ONLY = {
    *("--stopped", "--if-not-exists"),
    # A manual run starts now, with the packages of this environment.
    *("--requirements", "--cron", "--timezone", "--continuous", "--run-timeout"),
}
BY_HAND_ONLY = {"--once", "--dry-run", "--name", "--master", "--memory", "--folder"}


def flags_of(*path: str) -> set[str]:
    command: Any = typer.main.get_command(pipeline.app)
    for name in path:
        command = command.commands[name]
    return {flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")}


def test_a_manual_run_takes_the_flags_of_a_declaration() -> None:
    declared = {flag for kind in PipelineKind for flag in flags_of("create", kind)}
    assert flags_of("run") - BY_HAND_ONLY == declared - DECLARED_ONLY


def test_flags_become_settings() -> None:
    land = Flags(topic=["a", "b"], every=0.5, schema=["id long"], dedupe=60, start="latest", settings=["compact=false"])
    assert land.settings_of(LAND) == {
        "topics": "a,b",
        "every.ms": "500",
        "decode": "json",
        "schema": "id long",
        "dedupe.ms": "60000",
        "from": "latest",
        "compact": "false",
    }
    transform = Flags(
        sql="SELECT * FROM orders JOIN c",
        into="copies",
        schema=["orders=at timestamp"],
        table=["c=/lake/c"],
        watermark=["orders=at 1 minute"],
        settings=["into=others"],
    ).settings_of(TRANSFORM)
    assert transform == {
        "sql": "SELECT * FROM orders JOIN c",
        "into": "others",
        "schemas": '{"orders": "at timestamp"}',
        "tables": '{"c": "/lake/c"}',
        "watermarks": '{"orders": "at 1 minute"}',
    }
    check_pipeline("mine", TRANSFORM, transform)
    assert Flags(decode="none", rules="rules.json").settings_of(ROUTE) == {"decode": "none"}
    assert Flags(decode="none", schema=["id long"]).settings_of(LAND)["decode"] == "none"


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        (
            TRANSFORM,
            Flags(lake="/lake"),
            "--lake is not for transform; it takes --decode, --from, --into, --requirements",
        ),
        (ROUTE, Flags(sql="SELECT 1"), "--sql is not for route"),
        (LAND, Flags(rules="rules.json"), "--rules is not for land"),
        (LAND, Flags(schema=["a int", "b int"]), "given once for land"),
        (TRANSFORM, Flags(schema=["id long"]), "--schema takes NAME=VALUE"),
        (PipelineKind.JOB, Flags(pace=0.0), "--every must be longer than 0s"),
        (PipelineKind.JOB, Flags(run_timeout=0.0), "--run-timeout must be longer than 0s"),
        (PipelineKind.JOB, Flags(timezone="Europe/Berlin"), "--timezone is for --cron, which is not given"),
    ],
)
def test_flags_without_effect_are_refused(kind: PipelineKind, flags: Flags, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        flags.settings_of(kind)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            Flags(topic=["t"], key=["id"], order_by="ver"),
            "a table with one row per key is needed for `--key` and `--order-by`: set mode=upsert (--mode upsert)",
        ),
        (Flags(topic=["t"], decode="debezium"), "a table with one row per key is needed for decode=debezium: set"),
        (Flags(topic=["t"], mode="upsert", partition_by="day(at)"), "another time; leave `--partition-by` out"),
        (Flags(topic=["t"], mode="upsert", key=["id"], decode="schema"), "JSON payloads are needed for `--key`: set"),
    ],
)
def test_errors_name_only_the_given_flags(flags: Flags, message: str) -> None:
    with pytest.raises(InvalidSetting, match=re.escape(message)), named_by_caller(flags.flags_of_settings()):
        check_pipeline("mine", LAND, flags.settings_of(LAND))


def test_the_summary_of_an_interrupted_run_says_so_unless_it_has_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        tally = Tally()

        def run(self, *, once: bool) -> None:
            raise Terminated

    class Failing(Interrupted):
        def run(self, *, once: bool) -> None:
            raise InvalidSetting("wrong")

    declared = Pipeline(pipeline_id=UUID(int=1), name="mine", kind=LAND, overrides={"topics": "a"})
    by_hand = CommandRun(declared, PipelineStorage("", "", "/data"), "", is_declared=True, lake="", folder="")
    running: Any = Interrupted()
    failing: Any = Failing()
    with pytest.raises(Terminated):
        by_hand._drive(running, once=True, as_json=False)
    assert capsys.readouterr().out.startswith("mine: interrupted after 0 messages in 0 batches")
    with pytest.raises(InvalidSetting):
        by_hand._drive(failing, once=True, as_json=False)
    assert capsys.readouterr().out.startswith("mine: failed after 0 messages in 0 batches")
    with pytest.raises(Terminated):
        by_hand._drive(running, once=False, as_json=False)
    assert capsys.readouterr().out.startswith("mine: 0 messages in 0 batches")


def test_long_texts_may_be_in_files(tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text("def run(spark, millstream): ...\n")
    for name in ("code", "functions.code", "requirements", "sql", "schema"):
        flags = Flags(settings=[f"{name}=@{program}"])
        assert flags.settings_of(PipelineKind.JOB) == {name: "def run(spark, millstream): ..."}
    assert Flags(settings=["cron=@hourly"]).settings_of(PipelineKind.JOB) == {"cron": "@hourly"}
    missing = tmp_path / "missing.py"
    with pytest.raises(CommandFailed, match=re.escape(f"--set code=: there is no file {missing}")):
        Flags(settings=[f"code=@{missing}"]).settings_of(PipelineKind.JOB)


def test_an_update_takes_a_program_as_its_creation_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: dict[str, Any] = {}

    class Pipelines:
        def alter(self, name: str, changes: dict[str, Any]) -> list[str]:
            changed.update(changes)
            return []

    monkeypatch.setattr(pipeline, "call_pipelines", lambda _common, question: question(Pipelines()))
    code = "def run(spark, millstream): ..."
    (tmp_path / "job.py").write_text(f"{code}\n")
    (tmp_path / "packages.txt").write_text("packages.txt")
    pipeline.update("mine", file=str(tmp_path / "job.py"), requirements=str(tmp_path / "packages.txt"), unset=["cron"])
    assert changed == {"code": code, "requirements": "packages.txt", "cron": None}


@pytest.mark.parametrize("line", [1, 4])
def test_an_error_in_a_program_names_its_file_and_line(tmp_path: Path, line: int) -> None:
    program = tmp_path / "bad.py"
    program.write_text("\n" * (line - 1) + "def run(spark, millstream)\n")
    with pytest.raises(
        InvalidSetting, match=re.escape(f"the code is not Python: expected ':' ({program.name}, line {line})")
    ):
        Flags(file=str(program)).settings_of(PipelineKind.JOB)


def test_a_declared_pipeline_is_run_as_declared() -> None:
    _refuse_changes("mine", Flags(lake="/here", topic=[]), None)
    with pytest.raises(
        typer.BadParameter, match="--set applies only to a pipeline that is not declared; 'mine' runs as declared"
    ):
        _refuse_changes("mine", Flags(settings=["every.ms=5"]), None)
    with pytest.raises(typer.BadParameter, match="--name applies only to"):
        _refuse_changes("mine", Flags(), "other")


def test_a_pipeline_that_runs_on_a_node_must_be_stopped_first() -> None:
    class Taken:
        def take(self) -> None:
            raise GroupNotEmpty("it is being run by 'pipelines-node-1'")

    declared = Pipeline(pipeline_id=UUID(int=1), name="mine", kind=LAND, overrides={"topics": "a"})
    by_hand = CommandRun(declared, PipelineStorage("", "", "/data"), "", is_declared=True, lake="", folder="")
    claim: Any = Taken()
    with pytest.raises(GroupNotEmpty, match="by 'pipelines-node-1'; stop it first: millstream pipeline stop mine"):
        by_hand._acquire_claim(claim)
