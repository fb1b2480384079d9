"""Schemas as the registry stores them: immutable texts with ids, versions of subjects, and settings.

A subject belongs to a context, which has its own ids. It is written `:.context:subject`; the default context is `.` and
is left out.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import UUID

DEFAULT_CONTEXT: Final = "."
GLOBAL_CONTEXT: Final = "__GLOBAL"
"""The context whose settings are the defaults of all others."""

AVRO, JSON_SCHEMA, PROTOBUF = "AVRO", "JSON", "PROTOBUF"
SCHEMA_TYPES: Final = (JSON_SCHEMA, PROTOBUF, AVRO)

LEVELS: Final = ("BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE", "NONE")
DEFAULT_LEVEL: Final = "BACKWARD"
LEVEL: Final = "compatibilityLevel"
CONFIG_KEYS: Final = (
    *("alias", "normalize", "validateFields", LEVEL, "compatibilityGroup"),
    *("defaultMetadata", "overrideMetadata", "defaultRuleSet", "overrideRuleSet"),
)
"""Configuration keys of a subject or context."""
MODES: Final = ("READWRITE", "READONLY", "READONLY_OVERRIDE", "IMPORT", "FORWARD")
READWRITE, READONLY, READONLY_OVERRIDE, IMPORT, FORWARD = MODES


NUMBER_MAX: Final = 2**31 - 1
"""The greatest schema id and the greatest version: messages name their schemas by an id of 32 bits."""
IMPORTED_ID_MAX: Final = 2**30
"""The greatest id that a client may choose. An id reserves those below it, so half of them stay for other clients."""


class RegistryCode(enum.IntEnum):
    """The error codes of Confluent's registry. The first three digits are the HTTP status."""

    INCOMPATIBLE = 409
    SUBJECT_NOT_FOUND = 40401
    VERSION_NOT_FOUND = 40402
    SCHEMA_NOT_FOUND = 40403
    SUBJECT_SOFT_DELETED = 40404
    SUBJECT_NOT_SOFT_DELETED = 40405
    VERSION_SOFT_DELETED = 40406
    VERSION_NOT_SOFT_DELETED = 40407
    CONFIG_NOT_FOUND = 40408
    MODE_NOT_FOUND = 40409
    INVALID_SCHEMA = 42201
    INVALID_VERSION = 42202
    INVALID_LEVEL = 42203
    INVALID_MODE = 42204
    NOT_PERMITTED = 42205
    REFERENCE_EXISTS = 42206
    INVALID_SUBJECT = 42208
    TOO_LARGE = 42209
    INVALID_RULE_SET = 42210
    STORE_FAILED = 50001


class QualifiedSubject(NamedTuple):
    context: str
    name: str

    @classmethod
    def parse(cls, text: str) -> QualifiedSubject:
        """Split `:.context:subject`; anything else is a subject of the default context."""
        if text.startswith(":.") and (end := text.find(":", 1)) > 0:
            return cls(text[1:end], text[end + 1 :])
        if text.startswith(f":{GLOBAL_CONTEXT}:"):
            return cls(GLOBAL_CONTEXT, text[len(GLOBAL_CONTEXT) + 2 :])
        return cls(DEFAULT_CONTEXT, text)

    def sibling(self, text: str) -> QualifiedSubject:
        """Parse a subject that is in this one's context unless it names another."""
        parsed = self.parse(text)
        return parsed if text.startswith(":.") else QualifiedSubject(self.context, parsed.name)

    def __str__(self) -> str:
        return self.name if self.context == DEFAULT_CONTEXT else f":{self.context}:{self.name}"


def subject_topic(subject: str) -> str:
    """Return the topic whose access rules apply to a subject."""
    name = QualifiedSubject.parse(subject).name
    return name.removesuffix("-value") if name.endswith("-value") else name.removesuffix("-key")


class SchemaReference(NamedTuple):
    """A schema that another one uses by a name: an Avro type, a JSON Schema URI or a Protobuf file."""

    name: str
    subject: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaContent:
    """The registered content: the text and everything that distinguishes it from others."""

    schema_type: str
    text: str
    references: tuple[SchemaReference, ...] = ()
    metadata: Mapping[str, Any] | None = None
    rule_set: Mapping[str, Any] | None = None

    @property
    def size_bytes(self) -> int:
        """Return its approximate memory: the text, and everything else as JSON."""
        others = [self.references, self.metadata, self.rule_set]
        return len(self.text.encode()) + (len(json.dumps(others)) if any(others) else 0)

    @property
    def guid(self) -> UUID:
        """Return an id that is the same for equal content, in every context and cluster."""
        parts = [self.schema_type, self.text, self.references, self.metadata, self.rule_set]
        return UUID(bytes=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()[:16], version=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSchema:
    """Content with the id it has in a context, which never changes."""

    context: str
    schema_id: int
    guid: str
    content: SchemaContent


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectVersion:
    subject: QualifiedSubject
    version: int
    schema_id: int
    is_deleted: bool = False
    """Deleted versions are hidden, and keep their number and id."""
    is_gone: bool = False
    """Deleted permanently: kept only so that other nodes drop it, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectSettings:
    """Configuration and mode of a subject, or of a context if the subject's name is empty."""

    subject: QualifiedSubject
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The configuration as clients write it: compatibilityLevel, normalize, alias, metadata and rules."""
    mode: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is set: stored only so that other nodes drop what was, and never held in memory."""
        return not self.config and self.mode is None

    @property
    def size_bytes(self) -> int:
        """Return their approximate memory: the subject, the mode, and the configuration as JSON."""
        if self.is_empty:
            return 0
        return len(str(self.subject).encode()) + len(self.mode or "") + len(json.dumps(self.config))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaChanges:
    """The rows that the catalog stored after a given change."""

    last: int
    """The number of the last change."""
    schemas: Sequence[StoredSchema] = ()
    versions: Sequence[SubjectVersion] = ()
    settings: Sequence[SubjectSettings] = ()
