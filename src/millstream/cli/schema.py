"""`millstream schema`: list, show, compare, check, register and delete schemas, and set what is compatible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millstream.cli.connection import call_broker
from millstream.cli.exit_code import ExitCode
from millstream.cli.options import (
    COMMON,
    DEFAULT_BROKERS,
    DEFAULT_TIMEOUT_S,
    Brokers,
    Common,
    Noun,
    TimeoutSeconds,
    flag,
    read_text_file,
)
from millstream.cli.output import counted, print_line, print_list, print_result
from millstream.client.admin.position import POSITION_HELP, parse_position
from millstream.core.errors import InvalidRequest, SchemaRegistryError
from millstream.core.schema import AVRO, DEFAULT_CONTEXT, JSON_SCHEMA, LEVELS, PROTOBUF, SCHEMA_TYPES, RegistryCode

if TYPE_CHECKING:
    from millstream.protocol.private.schema_messages import SchemaMessage
    from millstream.protocol.wire.client import Client

app = Noun(help="List, show, compare, register and delete schemas.", no_args_is_help=True)

_TYPES: Final = {".avsc": AVRO, ".json": JSON_SCHEMA, ".proto": PROTOBUF}
_DEFAULT: Final = "default"
_REASONS_SHOWN: Final = 5

Subject = Annotated[
    str,
    typer.Argument(
        help="The subject: orders-value for the values of topic orders; :.context:orders-value in a context.",
        show_default=False,
    ),
]
Version = Annotated[str, typer.Option("--version", metavar="NUMBER", help="A version, or `latest`.")]
SchemaFile = Annotated[Path, typer.Argument(help="The file with the schema.")]
SchemaType = Annotated[
    str | None,
    typer.Option(
        "--type",
        metavar="TYPE",
        help="AVRO, JSON or PROTOBUF; by default, from the file name (.avsc, .json, .proto).",
    ),
]
References = Annotated[
    list[str] | None,
    typer.Option(
        "--reference",
        metavar="NAME=SUBJECT:VERSION",
        help="A schema that this one refers to by a name; may be repeated.",
    ),
]


@contextmanager
def _explained(subject: str, *, file: Path | None = None) -> Iterator[None]:
    """Say what to do about a missing subject, and what is wrong with a file; the registry answers as Confluent's."""
    try:
        yield
    except SchemaRegistryError as error:
        if error.code == RegistryCode.SUBJECT_NOT_FOUND:
            text = f"subject {subject!r} does not exist; millstream schema list shows those that do"
        elif error.code == RegistryCode.INVALID_SCHEMA and file is not None:
            text = f"{file} is not a valid schema: {error}"
        else:
            raise
        raise SchemaRegistryError(text, code=error.code) from error


@app.command("list")
def list_(
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="PREFIX", help="Only subjects that begin with this.", show_default=False)
    ] = "",
    deleted: Annotated[bool, typer.Option("--deleted", help="Include deleted subjects.")] = False,
    common: Common = COMMON,
) -> None:
    """List subjects with their latest version."""
    from millstream.client.admin.schemas import SchemaClient

    subjects = call_broker(common, lambda client: SchemaClient(client).latest(prefix or ":*:", deleted=deleted))
    keys = ("subject", "version", "id", "type", "deleted")
    listed = [_document(subject) for subject in subjects]
    empty = "No schemas; `millstream schema register SUBJECT FILE` adds one."
    rows = [[subject[key] for key in keys] for subject in listed]
    print_list({"schemas": listed}, keys, rows, empty=empty, as_json=common.as_json)


@app.command("show")
def show(
    subject: Subject,
    version: Version = "latest",
    deleted: Annotated[bool, typer.Option("--deleted", help="Also show a deleted version.")] = False,
    common: Common = COMMON,
) -> None:
    """Print a version of a subject."""
    from millstream.client.admin.schemas import SchemaClient, readable

    with _explained(subject):
        version_found = call_broker(
            common, lambda client: SchemaClient(client).version(subject, version, deleted=deleted)
        )
    print_result(_document(version_found), readable(version_found).rstrip("\n"), as_json=common.as_json)


@app.command("diff")
def diff(
    subject: Subject,
    old: Annotated[str, typer.Argument(metavar="OLD", help="A version.", show_default=False)],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The other version.")] = "latest",
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Print the lines in which two versions of a subject differ."""
    from millstream.client.admin.schemas import SchemaClient, difference

    async def both(client: Client) -> list[SchemaMessage]:
        return [await SchemaClient(client).version(subject, version) for version in (old, new)]

    with _explained(subject):
        versions = call_broker(Common(brokers=brokers, timeout=timeout), both)
    for line in difference(*versions):
        print_line(line)


@app.command("register")
def register(
    subject: Subject,
    file: SchemaFile,
    schema_type: SchemaType = None,
    references: References = None,
    normalize: Annotated[bool, typer.Option("--normalize", help="Ignore the order of keys and properties.")] = False,
    common: Common = COMMON,
) -> None:
    """Register a schema as the next version of a subject."""
    from millstream.client.admin.schemas import SchemaClient, parse_reference
    from millstream.protocol.private.schema_messages import RegisterSchemaRequest

    request = RegisterSchemaRequest(
        subject=subject,
        schema=read_text_file(file, flag="the schema"),
        schema_type=_type_of(file, schema_type),
        references=[parse_reference(text) for text in references or ()],
        normalize=normalize,
    )
    with _explained(subject, file=file):
        made = call_broker(common, lambda client: SchemaClient(client).register(request))
    text = f"{subject} version {made.version} is registered with id {made.id}."
    print_result({"subject": subject, "version": made.version, "id": made.id}, text, as_json=common.as_json)


@app.command("delete")
def delete(
    subject: Subject,
    version: Annotated[str | None, typer.Option("--version", metavar="NUMBER", help="Only this version.")] = None,
    permanent: Annotated[bool, typer.Option("--permanent", help="Delete permanently what is already deleted.")] = False,
    common: Common = COMMON,
) -> None:
    """Delete a subject or one of its versions. Messages with its ids stay readable unless the deletion is permanent."""
    from millstream.client.admin.schemas import SchemaClient
    from millstream.protocol.private.schema_messages import DeleteSubjectRequest

    request = DeleteSubjectRequest(subject=subject, version=version, permanent=permanent)
    with _explained(subject):
        versions = call_broker(common, lambda client: SchemaClient(client).delete(request))
    listed = ", ".join(str(number) for number in versions)
    text = f"Deleted{' permanently' if permanent else ''}: {subject} version {listed}."
    print_result({"subject": subject, "versions": versions}, text, as_json=common.as_json)


@app.command("compatibility")
def compatibility(
    subject: Annotated[
        str, typer.Argument(help="The subject. Default: the level of all subjects without their own.")
    ] = "",
    level: Annotated[
        str | None,
        typer.Option("--set", metavar="LEVEL", help=f"The new level: {', '.join(LEVELS)}, or {_DEFAULT}."),
    ] = None,
    common: Common = COMMON,
) -> None:
    """Show or set the compatibility level of a subject. It decides which schemas become its next version."""
    from millstream.client.admin.schemas import SchemaClient
    from millstream.protocol.private.schema_messages import ConfigureRequest

    async def operation(client: Client) -> str:
        schemas = SchemaClient(client)
        if level == _DEFAULT:
            await schemas.configure(ConfigureRequest(subject=subject, reset_config=True))
        elif level is not None:
            await schemas.configure(ConfigureRequest(subject=subject, config={"compatibilityLevel": level.upper()}))
        settings = await schemas.settings(subject, default_to_global=True)
        return str((settings.config or {})["compatibilityLevel"])

    current = call_broker(common, operation)
    print_result({"subject": subject, "compatibility": current}, current, as_json=common.as_json)


@app.command("check")
def check(
    subject: Subject,
    file: SchemaFile,
    schema_type: SchemaType = None,
    references: References = None,
    topic: Annotated[
        str | None,
        flag("--topic", "NAME", "Also read the messages of this topic with the new schema."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="POSITION",
            help=f"The position of the first message: {POSITION_HELP}. Default: all that are stored.",
        ),
    ] = None,
    common: Common = COMMON,
) -> None:
    """Check a schema against its subject and stored messages. Shows messages that it could not read.

    Exits with 5 if it is incompatible or cannot read a message.
    """
    from millstream.client.admin.schemas import explain_reasons, parse_reference
    from millstream.client.admin.topic_schema import try_schema
    from millstream.protocol.private.schema_messages import CheckSchemaRequest

    if since is not None and topic is None:
        raise typer.BadParameter("--since needs --topic")
    request = CheckSchemaRequest(
        subject=subject,
        schema=read_text_file(file, flag="the schema"),
        schema_type=_type_of(file, schema_type),
        references=[parse_reference(text) for text in references or ()],
    )
    begin = None if since is None else parse_position(since)
    with _explained(subject, file=file):
        found = call_broker(
            common,
            lambda client: try_schema(client, request, topic=topic, since=begin, patience_s=common.timeout),
        )
    lines = [f"{subject}: {'incompatible' if found.reasons else 'compatible'}."]
    if found.reasons:
        explained = explain_reasons(found.reasons, request.schema)
        # A reason of another kind has no explanation.
        lines += [explained.rule, *explained.changes] if explained.changes else found.reasons
    if topic is not None:
        without = f", {counted(found.skipped, 'message')} without a schema" if found.skipped else ""
        lines.append(f"{counted(found.messages, 'message')} of {topic}: {found.unreadable} cannot be read{without}.")
        lines += [f"{number} × {reason}" for reason, number in found.counted.most_common(_REASONS_SHOWN)]
        lines += [f"{topic}/{record['partition']}@{record['offset']}  {record['reason']}" for record in found.first]
    print_result(found.document(), "\n".join(lines), as_json=common.as_json)
    if found.reasons or found.unreadable:
        raise typer.Exit(ExitCode.CONFLICT)


Topic = Annotated[str, typer.Option("--topic", metavar="NAME", help="The topic of Confluent's registry.")]
Context = Annotated[str, typer.Option("--context", metavar=".NAME", help="The context; the default one is `.`.")]


@app.command("import")
def import_(
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="HOST:PORT", help="A broker of the cluster that has the topic, if it is a different one."
        ),
    ] = None,
    topic: Topic = "_schemas",
    context: Context = DEFAULT_CONTEXT,
    common: Common = COMMON,
) -> None:
    """Import schemas of Confluent's registry with their ids. The context must not contain any schemas yet."""
    from millstream.client.admin.topic_schema import import_schemas

    async def operation(client: Client) -> int:
        if source is None:
            return await import_schemas(client, topic, client, context=_context(context))
        from millstream.protocol.wire.client import Client as WireClient

        async with WireClient.connect(source, client_id="millstream-cli", timeout_s=common.timeout) as other:
            return await import_schemas(other, topic, client, context=_context(context))

    number = call_broker(common, operation)
    print_result(
        {"versions": number, "context": _context(context)},
        f"Imported {counted(number, 'version')}.",
        as_json=common.as_json,
    )


@app.command("export")
def export(topic: Topic = "_schemas", context: Context = DEFAULT_CONTEXT, common: Common = COMMON) -> None:
    """Export the schemas of a context to a new topic. Confluent's registry can start from this topic."""
    from millstream.client.admin.topic_schema import export_schemas

    number, others = call_broker(common, lambda client: export_schemas(client, topic, context=_context(context)))
    text = f"Exported {counted(number, 'version')} to {topic}."
    if others:
        text += f" Not exported: the contexts {', '.join(others)} (--context)."
    print_result({"versions": number, "topic": topic, "other_contexts": others}, text, as_json=common.as_json)


def _context(name: str) -> str:
    return name if name.startswith(".") else f".{name}"


def _type_of(file: Path, schema_type: str | None) -> str:
    chosen = (schema_type or _TYPES.get(file.suffix, "")).upper()
    if chosen not in SCHEMA_TYPES:
        raise InvalidRequest(f"the type of {file.name} is unknown; pass --type {', '.join(sorted(SCHEMA_TYPES))}")
    return chosen


def _document(schema: SchemaMessage) -> dict[str, Any]:
    return {
        "subject": schema.subject,
        "version": schema.version,
        "id": schema.id,
        "guid": schema.guid,
        "type": schema.schema_type,
        "schema": schema.schema,
        "references": [{"name": name, "subject": to, "version": number} for name, to, number in schema.references],
        "metadata": schema.metadata,
        "rule_set": schema.rule_set,
        "deleted": schema.deleted,
    }
