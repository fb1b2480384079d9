"""The changes of declarations by requests, as the audit log records them.

Each API declares its `changes`: None, or a function that derives the changes from a request and its response; a test
fails for an API that declares neither. Values of settings are recorded for topics, nodes and quotas only: those of
subscriptions and pipelines may be secrets.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from millstream.broker.security.audit import Activity, Change
from millstream.broker.security.rights import Rights
from millstream.core.acl import Acl, Operation, PatternType, Permission, ResourceType
from millstream.core.tasks import finish

CREATE, UPDATE, DELETE = Activity.CREATE, Activity.UPDATE, Activity.DELETE

Users = Mapping[tuple[str, str], Any]
"""The credentials before the request, by user and mechanism."""

TIMED_OUT: Final = 7
_NOTHING: Final[Mapping[str, Any]] = {}
_CONFIG_KINDS: Final = {2: "topic", 4: "node", 32: "group"}
_DETAILS: Final = ("topics", "topic", "kind", "enabled", "parked", "to", "version", "permanent", "config", "mode")
"""Fields of private requests that are recorded as they are, since none of them is a secret."""


class Changes(Protocol):
    """Derives the changes from a request and its response."""

    def __call__(self, request: Any, response: Any, users: Users, /) -> Iterable[Change]: ...


async def record_changes(
    api: str, changes: Changes | None, request: Any, rights: Rights, work: Coroutine[Any, Any, Any]
) -> Any:
    """Await the response of an API, and record what was changed.

    A change is carried out and recorded even if the client disconnects meanwhile, which could otherwise hide it.
    """
    if changes is None or getattr(request, "validate_only", False):
        return await work
    users = rights.credentials

    async def carry_out() -> Any:
        response = await work
        for change in changes(request, response, users):
            rights.record(api, change)
        return response

    rights.is_changing_declarations = True
    try:
        return await finish(carry_out())
    finally:
        rights.is_changing_declarations = False


def single_change(kind: str, activity: Activity, *, name: str = "name") -> Changes:
    """Record the change of the one thing that a private request names in a field."""

    def changes(request: Any, response: Any, _users: Users) -> Iterator[Change]:
        # The schema registry refuses by its own code.
        if response.error == 0 and not getattr(response, "code", 0):
            named = getattr(request, name) or "(all)"
            yield Change(activity=activity, kind=kind, name=named, data=_details(request))

    return changes


def _details(request: Any) -> dict[str, Any]:
    details: dict[str, Any] = {}
    for name in _DETAILS:
        value = getattr(request, name, None)
        if value is not None:
            details[name] = value
    if getattr(request, "settings", None):
        details["settings"] = sorted(request.settings)
    if hasattr(request, "put"):
        details["rules"] = sorted({*(rule.name for rule in request.put), *request.delete})
    return details


def carried_out(results: Iterable[Any]) -> Iterator[Any]:
    """Yield the results of changes that were made or, after a timeout, may have been."""
    return (result for result in results if result.error_code in (0, TIMED_OUT))


def change_of(result: Any, activity: Activity, kind: str, name: str, data: Mapping[str, Any] = _NOTHING) -> Change:
    is_certain = result.error_code != TIMED_OUT
    return Change(activity=activity, kind=kind, name=name, data=data, is_certain=is_certain)


def settings_changed(request: Any, response: Any, _users: Users) -> Iterator[Change]:
    configs = {(resource.resource_type, resource.resource_name): resource.configs for resource in request.resources}
    for result in carried_out(response.responses):
        kind = _CONFIG_KINDS.get(result.resource_type, "configuration")
        settings = configs[result.resource_type, result.resource_name]
        # Groups include subscriptions, whose settings may be secrets.
        data = {setting.name: None if kind == "group" else setting.value for setting in settings}
        yield change_of(result, UPDATE, kind, result.resource_name or "(all)", data)


def offsets_changed(request: Any, response: Any, _users: Users) -> Iterator[Change]:
    """OffsetDelete, AlterShareGroupOffsets, DeleteShareGroupOffsets: offsets of a group, by topic."""
    if response.error_code in (0, TIMED_OUT):
        topics = [getattr(topic, "topic_name", None) or topic.name for topic in request.topics]
        yield change_of(response, UPDATE, "group", request.group_id, {"offsets of": topics})


def parse_acl(rule: Any, pattern: int) -> Acl:
    """Read a rule of a Kafka message; raise `ValueError` for unknown numbers."""
    return Acl(
        resource_type=ResourceType(rule.resource_type),
        resource_name=rule.resource_name,
        pattern=PatternType(pattern),
        principal=rule.principal,
        host=rule.host,
        operation=Operation(rule.operation),
        permission=Permission(rule.permission_type),
    )


def acl_change(activity: Activity, rule: Any, pattern: int, result: Any) -> Change:
    acl = parse_acl(rule, pattern)
    return change_of(result, activity, "acl", str(acl), {"principal": acl.principal})
