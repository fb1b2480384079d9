"""Private requests about schemas. A response has a `code` if the registry refuses: that of Confluent's registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from millstream.protocol.private.message import Response

REGISTER_KEY: Final = 32070
LOOKUP_KEY: Final = 32071
CHECK_KEY: Final = 32072
GET_KEY: Final = 32073
LIST_KEY: Final = 32074
SUBJECT_KEY: Final = 32075
DELETE_KEY: Final = 32076
SETTINGS_KEY: Final = 32077
CONFIGURE_KEY: Final = 32078


class RegistryResponse(Response, frozen=True, kw_only=True):
    """The outcome of a request to the registry."""

    code: int = 0
    """Confluent's code for why the registry refuses; `message` explains it."""


class SchemaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A registered schema, as a version of a subject if it was asked for as one."""

    id: int
    guid: str
    schema_type: str
    schema: str
    references: Sequence[tuple[str, str, int]] = ()
    metadata: Mapping[str, Any] | None = None
    rule_set: Mapping[str, Any] | None = None
    subject: str = ""
    version: int = 0
    deleted: bool = False


class SchemaBody(msgspec.Struct, frozen=True, kw_only=True):
    """A schema as a client sends it for a subject."""

    subject: str
    schema: str
    schema_type: str = "AVRO"
    references: Sequence[tuple[str, str, int]] = ()
    metadata: Mapping[str, Any] | None = None
    rule_set: Mapping[str, Any] | None = None
    normalize: bool = False


class RegisterSchema(SchemaBody, frozen=True, kw_only=True):
    """Registers a schema; an id is given only in IMPORT mode. Version -1 compares it with the latest version only."""

    id: int | None = None
    version: int | None = None


class LookupSchema(SchemaBody, frozen=True, kw_only=True):
    """Finds the version of a subject that has a schema."""

    deleted: bool = False
    format: str = ""


class CheckSchema(SchemaBody, frozen=True, kw_only=True):
    """Checks a schema against one version, or against those that the subject's level covers."""

    version: str | None = None
    compiled: bool = False
    """Whether the schema is returned as codecs need it; a subject without versions is then no error."""


class CheckResponse(RegistryResponse, frozen=True, kw_only=True):
    """Why a schema is incompatible; nothing if it is compatible."""

    reasons: Sequence[str] = ()
    compiled: str = ""


class GetSchema(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for a schema by its id in the context of a subject, or by its guid."""

    id: int = 0
    guid: str = ""
    subject: str = ""
    format: str = ""
    deleted: bool = False
    """Whether deleted versions that have the schema are listed, too."""


class SchemaResponse(RegistryResponse, frozen=True, kw_only=True):
    """A schema, and which versions have it."""

    schema: SchemaMessage | None = None
    uses: Sequence[tuple[str, int]] = ()
    ids: Sequence[tuple[str, int]] = ()
    """The context and id of each schema with the guid."""
    max_id: int = 0


class ListSubjects(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for the subjects that start with a prefix, `:*:` standing for those of every context."""

    prefix: str = ""
    deleted: bool = False
    deleted_only: bool = False
    schemas: bool = False
    """Whether their schemas are returned, and not just the names."""
    latest_only: bool = False
    offset: int = 0
    """How many of the schemas, or else of the subjects, are left out at the beginning."""
    limit: int = -1
    """How many are returned; a response has its own limit for schemas."""


class SubjectsResponse(RegistryResponse, frozen=True, kw_only=True):
    """Names of subjects, the schemas that were asked for, and every context."""

    subjects: Sequence[str] = ()
    schemas: Sequence[SchemaMessage] = ()
    contexts: Sequence[str] = ()


class GetSubject(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for the versions of a subject, or for one of them."""

    subject: str
    version: str | None = None
    deleted: bool = False
    deleted_only: bool = False
    format: str = ""
    metadata: Mapping[str, str] | None = None
    """Asks for the latest version that has these properties."""


class SubjectResponse(RegistryResponse, frozen=True, kw_only=True):
    """The versions of a subject, or one version and the ids of the schemas that refer to it."""

    versions: Sequence[int] = ()
    schema: SchemaMessage | None = None
    referrers: Sequence[int] = ()


class DeleteSubject(msgspec.Struct, frozen=True, kw_only=True):
    """Deletes a subject, or one of its versions."""

    subject: str
    version: str | None = None
    permanent: bool = False


class DeletedResponse(RegistryResponse, frozen=True, kw_only=True):
    """The versions that were deleted."""

    versions: Sequence[int] = ()


class GetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for the settings of a subject, or of the default context."""

    subject: str = ""
    default_to_global: bool = False


class SettingsResponse(RegistryResponse, frozen=True, kw_only=True):
    """Configuration and mode; None where nothing is set."""

    config: Mapping[str, Any] | None = None
    mode: str | None = None


class Configure(msgspec.Struct, frozen=True, kw_only=True):
    """Changes the configuration or the mode of a subject or context; the response has what was set before."""

    subject: str = ""
    config: Mapping[str, Any] | None = None
    mode: str | None = None
    reset_config: bool = False
    reset_mode: bool = False
    force: bool = False
