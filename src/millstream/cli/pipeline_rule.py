"""`millstream pipeline rule`: put, load, list and delete the rules of a pipeline that routes."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.connection import call_broker, call_pipelines, complete_topics
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import COMMON, Common, Noun, flag, read_text_file
from millstream.cli.output import counted, one_line, print_list, print_result, print_with_notes
from millstream.cli.pipeline_options import Name
from millstream.core.pipeline import PipelineKind, Rule
from millstream.core.pipeline_rules import check_rules

if TYPE_CHECKING:
    from millstream.protocol.wire.client import Client

app = Noun(help="Put, load, list and delete the rules of a route pipeline.", no_args_is_help=True)

RuleName = Annotated[str, typer.Argument(help="The name of the rule.", show_default=False)]


@app.command("put")
def put(
    name: Name,
    rule: RuleName,
    topic: Annotated[
        str, flag("--topic", "TOPIC", "The topic whose messages it routes.", autocompletion=complete_topics)
    ],
    to: Annotated[list[str], flag("--to", "TOPIC", "The topic to route them to; may be repeated.")],
    where: Annotated[
        str,
        flag(
            "--where",
            "CONDITION",
            'The condition that messages must match, as in "payload.total > 1000". Default: all.',
        ),
    ] = "",
    subscription: Annotated[
        str, flag("--subscription", "NAME", "Use the filter of this subscription as the condition.")
    ] = "",
    common: Common = COMMON,
) -> None:
    """Add or replace a rule; it applies from the next batch on."""
    new = Rule(name=rule, topic=topic, targets=tuple(to), condition=where, subscription=subscription)
    check_rules(PipelineKind.ROUTE, [new])
    changed = call_pipelines(common, lambda pipelines: pipelines.change_rules(name, [new]))
    already_read = call_broker(common, lambda client: _count_already_read(client, name, topic))
    text = (
        f"Pipeline {one_line(name)} routes {topic} to {', '.join(to)} by rule {one_line(rule)}, {_since(already_read)}."
    )
    document = {"pipeline": name, "rule": rule, "rules": changed.rules, "already_read": already_read}
    print_with_notes(document, text, changed.notes, as_json=common.as_json)


@app.command("load")
def load(
    name: Name,
    file: Annotated[
        str, typer.Argument(help="A JSON list of rules, as rule list --json prints it; - is standard input.")
    ],
    replace: Annotated[bool, typer.Option("--replace", help="Delete the rules that are not in the file.")] = False,
    common: Common = COMMON,
) -> None:
    """Load many rules in one step: all of them, or none."""
    rules = read_rules(file)
    rules_to_delete: list[str] = []
    if replace:
        named = {rule.name for rule in rules}
        rules_to_delete = [rule.name for rule in _rules_of(name, common) if rule.name not in named]
    changed = call_pipelines(common, lambda pipelines: pipelines.change_rules(name, rules, deleted=rules_to_delete))
    deleted = len(rules_to_delete)
    text = f"Pipeline {one_line(name)} has {counted(changed.rules, 'rule')}: {len(rules):,} put, {deleted:,} deleted."
    document = {"pipeline": name, "put": len(rules), "deleted": deleted, "rules": changed.rules}
    print_with_notes(document, text, changed.notes, as_json=common.as_json)


@app.command("list")
def list_(name: Name, common: Common = COMMON) -> None:
    """List the rules of a pipeline."""
    rules = _rules_of(name, common)
    print_list(
        [asdict(rule) for rule in rules],
        ("rule", "topic", "to", "where"),
        [[rule.name, rule.topic, ", ".join(rule.targets), condition_text(rule)] for rule in rules],
        empty=f"No rules yet; add one with: millstream pipeline rule put {one_line(name)} RULE --topic … --to …",
        as_json=common.as_json,
    )


@app.command("delete")
def delete(
    name: Name,
    rule: Annotated[list[str], typer.Argument(help="The names of the rules.", show_default=False)],
    common: Common = COMMON,
) -> None:
    """Delete rules; messages that they have routed stay."""
    remaining = call_pipelines(common, lambda pipelines: pipelines.change_rules(name, deleted=rule)).rules
    text = f"Deleted {counted(len(rule), 'rule')} of pipeline {one_line(name)}; {remaining:,} left."
    print_result({"pipeline": name, "deleted": len(rule), "rules": remaining}, text, as_json=common.as_json)


async def _count_already_read(client: Client, name: str, topic: str) -> int:
    """Return how many messages of a topic a pipeline has already read; they are not routed again."""
    from millstream.client.admin.backlog import Backlogs, reader_of
    from millstream.client.admin.pipelines import PipelineClient, pipeline_of

    topic_metadata = (await client.metadata([topic])).topics.get(topic)
    (described,) = await PipelineClient(client).describe([name])
    reader = reader_of(pipeline_of(described))
    if topic_metadata is None or reader is None:
        return 0
    backlogs = await Backlogs(client).in_topic([reader], topic_metadata)
    return backlogs[name].passed if name in backlogs else 0


def _since(already_read: int) -> str:
    if not already_read:
        return "from the next batch on"
    behind = (
        "1 message that it has already read is"
        if already_read == 1
        else f"{already_read:,} messages that it has already read are"
    )
    return f"from the next batch on; {behind} not routed again"


def condition_text(rule: Rule) -> str:
    if rule.subscription:
        return f"as subscription {rule.subscription}"
    return rule.condition or "all"


def read_rules(file: str) -> tuple[Rule, ...]:
    import msgspec

    from millstream.core.json_problem import plain_problem
    from millstream.protocol.private.pipeline_messages import NewRule, declared_rules

    text = sys.stdin.read() if file == "-" else read_text_file(Path(file), flag="the rules")
    try:
        rules = declared_rules(msgspec.json.decode(text, type=list[NewRule]))
    except msgspec.MsgspecError as error:
        raise CommandFailed(
            f"{file} is not a JSON list of rules: {plain_problem(error)}; a rule has name, topic, targets, condition "
            "or subscription",
            ExitCode.USAGE,
        ) from None
    return tuple(rules)


def _rules_of(name: str, common: Common) -> list[Rule]:
    import msgspec

    (described,) = call_pipelines(common, lambda pipelines: pipelines.describe([name]))
    return msgspec.convert(described["rules"], list[Rule])
