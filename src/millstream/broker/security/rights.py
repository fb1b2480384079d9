"""The rights of a connection's client; where clients do not authenticate, connections have no `Rights`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from uuid import UUID

from millstream.broker.security.audit import Actor, Change
from millstream.broker.security.authorizer import AclSnapshot
from millstream.broker.security.state import SecurityState
from millstream.core.acl import CLUSTER_NAME, OPERATIONS, Operation, ResourceType
from millstream.core.credential import DELETED_OWNER, ApiToken, Owner, ScramCredential
from millstream.core.errors import (
    ClusterNotAuthorized,
    GroupNotAuthorized,
    MillstreamError,
    NotAuthorized,
    TopicNotAuthorized,
    TransactionNotAuthorized,
)
from millstream.core.ids import NodeId
from millstream.core.subscription import LETTERS_PREFIX
from millstream.core.topic import AUDIT

ANONYMOUS: Final = "User:ANONYMOUS"
OWNER_HOST: Final = "127.0.0.1"
"""The host of pipelines and push, for rules that name a host."""
_REMEMBERED_MAX: Final = 10_000
_REMEMBERED_CHARACTERS_MAX: Final = 256
"""A request may name a resource that is as long as the request; remembering such names would take all memory."""
_ON_AUDIT: Final = (Operation.READ, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)
"""The operations on the audit log; no one can do others."""
_ERRORS: Final[dict[ResourceType, type[MillstreamError]]] = {
    ResourceType.TOPIC: TopicNotAuthorized,
    ResourceType.GROUP: GroupNotAuthorized,
    ResourceType.TRANSACTIONAL_ID: TransactionNotAuthorized,
    ResourceType.CLUSTER: ClusterNotAuthorized,
}
_NOUNS: Final = {
    ResourceType.TOPIC: "topic",
    ResourceType.GROUP: "group",
    ResourceType.TRANSACTIONAL_ID: "transactional id",
    ResourceType.CLUSTER: "cluster",
}


class SubscribedTopic(str):
    """A topic that a request means by naming its subscription; errors name it only to those who may describe it."""

    __slots__ = ()


def _resource(kind: ResourceType, name: str) -> tuple[ResourceType, str]:
    """Return the resource whose rules apply: the subscription that tracks a dead letter topic counts as the topic."""
    if kind is ResourceType.GROUP and name.startswith(LETTERS_PREFIX):
        return ResourceType.TOPIC, name.removeprefix(LETTERS_PREFIX)
    return kind, name


class Rights:
    """The rights of a principal at an address; decisions are cached until the rules change."""

    __slots__ = (
        "_decisions",
        "_scopes",
        "_snapshot",
        "_state",
        "host",
        "is_changing_declarations",
        "node_id",
        "principal",
        "tokens",
    )

    def __init__(
        self,
        state: SecurityState,
        principal: str,
        host: str,
        *,
        node_id: NodeId | None = None,
        tokens: Sequence[ApiToken] = (),
    ) -> None:
        self.principal = principal
        self.host = host
        self.node_id = node_id
        """The node of this cluster that the client is; nodes may do everything."""
        self.tokens = tuple(tokens)
        """The API token of the client and those it was created with: the scope of each applies."""
        self.is_changing_declarations = False
        """Whether a request of the client that changes declarations is being processed; it may revoke its caller."""
        self._scopes = tuple(AclSnapshot(token.scope) for token in tokens if token.scope)
        self._state = state
        self._snapshot: AclSnapshot | None = None
        self._decisions: dict[tuple[Operation, ResourceType, str], bool] = {}

    @property
    def identity(self) -> tuple[str, ...]:
        """Return the principal and the API tokens: a token has other rights than its owner, or its other tokens."""
        return (self.principal, *(token.token_id for token in self.tokens))

    def allows(self, operation: Operation, kind: ResourceType, name: str) -> bool:
        if self.node_id is not None:
            return True
        snapshot = self._state.snapshot
        if snapshot is not self._snapshot or len(self._decisions) > _REMEMBERED_MAX:
            self._snapshot = snapshot
            self._decisions = {}
        key = (operation, kind, name)
        decision = self._decisions.get(key)
        if decision is None:
            resource = _resource(kind, name)
            decision = all(
                rules.decide(self.principal, self.host, operation, *resource) for rules in (snapshot, *self._scopes)
            )
            if len(name) <= _REMEMBERED_CHARACTERS_MAX:
                self._decisions[key] = decision
        return decision

    def check(self, operation: Operation, kind: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Return the same as `allows`, and audit a denial: the request is refused, not just filtered."""
        is_allowed = self.allows(operation, kind, name)
        if not is_allowed:
            self._state.audit.deny(self.actor, operation, kind, str(name))
        return is_allowed

    def record(self, api: str, change: Change) -> None:
        self._state.audit.change(self.actor, api, change)

    @property
    def actor(self) -> Actor:
        return Actor(self.principal, self.host, self.tokens[0].token_id if self.tokens else "")

    @property
    def credentials(self) -> Mapping[tuple[str, str], ScramCredential]:
        return self._state.credentials

    def allows_any(self, operation: Operation, kind: ResourceType) -> bool:
        """Whether the client may do an operation on at least one resource of a type."""
        if self.node_id is not None:
            return True
        rules = (self._state.snapshot, *self._scopes)
        return all(rule.decide_any(self.principal, self.host, operation, kind) for rule in rules)

    def has_token(self, token: ApiToken | None) -> bool:
        """Whether an API token is the client's own; for a scoped token, only itself and those created with it."""
        if token is None or token.owner != self.principal:
            return False
        chain = self._state.token_chain(token.token_id)
        return not self._scopes or any(token.token_id == self.tokens[0].token_id for token in chain)

    @property
    def owner(self) -> Owner | None:
        """The client as the owner of what it changes; None for nodes, which change things for others."""
        return None if self.node_id is not None else self._state.owner(self.principal)

    def topic(self, operation: Operation, name: str) -> bool:
        return self.allows(operation, ResourceType.TOPIC, name)

    def group(self, operation: Operation, name: str) -> bool:
        return self.allows(operation, ResourceType.GROUP, name)

    def transaction(self, operation: Operation, name: str) -> bool:
        """Whether the client may do an operation on a transactional id."""
        return self.allows(operation, ResourceType.TRANSACTIONAL_ID, name)

    def cluster(self, operation: Operation) -> bool:
        return self.allows(operation, ResourceType.CLUSTER, CLUSTER_NAME)

    def require(self, operation: Operation, kind: ResourceType, name: str = CLUSTER_NAME) -> None:
        """Raise the error for the resource's type unless the client is allowed."""
        if not self.check(operation, kind, name):
            kind, name = _resource(kind, name)
            what = "the cluster" if kind is ResourceType.CLUSTER else f"{_NOUNS[kind]} {name!r}"
            if isinstance(name, SubscribedTopic) and not self.topic(Operation.DESCRIBE, name):
                what = "every topic of the subscription"
            does = operation.name.lower().replace("_configs", " the settings of").replace("_", " ")
            raise _ERRORS[kind](f"{self.principal} may not {does} {what}")

    def require_all(self, operation: Operation, kind: ResourceType, names: Iterable[str]) -> None:
        """Raise the same for the first of several resources that is not allowed."""
        for name in names:
            self.require(operation, kind, name)

    def topic_name(self, topic_id: UUID) -> str | None:
        return self._state.topic_name(topic_id)

    def has_topic(self, name: str) -> bool:
        return self._state.has_topic(name)

    def operations(self, kind: ResourceType, name: str = CLUSTER_NAME) -> int:
        """Return the allowed operations on a resource as a Kafka bit field."""
        is_audit = kind is ResourceType.TOPIC and name == AUDIT
        possible = _ON_AUDIT if is_audit else OPERATIONS[kind]
        return sum(1 << operation for operation in possible if self.allows(operation, kind, name))


def owner_refusal(state: SecurityState, owner: Owner, needs: Iterable[tuple[Operation, ResourceType, str]] = ()) -> str:
    """Return why something cannot act with its owner's rights; empty if it can."""
    takes_over = "the user who changes it becomes its owner"
    if owner.principal in ("", ANONYMOUS):
        return f"it has no owner, since it was changed without authentication; {takes_over}"
    if state.is_gone(owner):
        return f"its owner {owner.principal.removesuffix(DELETED_OWNER)} was deleted; {takes_over}"
    rights = Rights(state, owner.principal, OWNER_HOST)
    try:
        for operation, kind, name in needs:
            rights.require(operation, kind, name)
    except NotAuthorized as error:
        return f"its owner may no longer act: {error}"
    return ""
