"""Private requests about schemas. A response has a `code` if the registry refuses: that of Confluent's registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from millstream.core.schema import AVRO
from millstream.protocol.private.message import Request, Response

R = TypeVar("R", bound=Response)


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

    def as_confluent(self) -> dict[str, Any]:
        """Return the schema, without its place in a subject, as Confluent's registry writes it."""
        references = [
            {"name": name, "subject": subject, "version": version} for name, subject, version in self.references
        ]
        document = {
            "schemaType": None if self.schema_type == AVRO else self.schema_type,
            "schema": self.schema,
            "references": references or None,
            "metadata": self.metadata,
            "ruleSet": self.rule_set,
        }
        return {name: value for name, value in document.items() if value is not None}


class SchemaBody(Request[R], Generic[R], frozen=True, kw_only=True):
    """A schema as a client sends it for a subject."""

    subject: str
    schema: str
    schema_type: str = AVRO
    references: Sequence[tuple[str, str, int]] = ()
    metadata: Mapping[str, Any] | None = None
    rule_set: Mapping[str, Any] | None = None
    normalize: bool = False


class SchemaResponse(RegistryResponse, frozen=True, kw_only=True):
    """A schema, and which versions have it."""

    schema: SchemaMessage | None = None
    uses: Sequence[tuple[str, int]] = ()
    ids: Sequence[tuple[str, int]] = ()
    """The context and id of each schema with the guid."""
    max_id: int = 0


class RegisterSchemaRequest(SchemaBody[SchemaResponse], frozen=True, kw_only=True):
    """Registers a schema; an id is given only in IMPORT mode. Version -1 compares it with the latest version only."""

    KEY: ClassVar = 32070
    id: int | None = None
    version: int | None = None


class LookupSchemaRequest(SchemaBody[SchemaResponse], frozen=True, kw_only=True):
    """Finds the version of a subject that has a schema."""

    KEY: ClassVar = 32071
    deleted: bool = False
    format: str = ""


class CheckResponse(RegistryResponse, frozen=True, kw_only=True):
    """The reasons why a schema is incompatible; none if it is compatible."""

    reasons: Sequence[str] = ()
    compiled: str = ""


class CheckSchemaRequest(SchemaBody[CheckResponse], frozen=True, kw_only=True):
    """Checks a schema against one version, or against those that the subject's level covers."""

    KEY: ClassVar = 32072
    version: str | None = None
    compiled: bool = False
    """Whether the schema is returned as codecs need it; a subject without versions is then no error."""


class GetSchemaRequest(Request[SchemaResponse], frozen=True, kw_only=True):
    """Asks for a schema by its id in the context of a subject, or by its guid."""

    KEY: ClassVar = 32073
    id: int = 0
    guid: str = ""
    subject: str = ""
    format: str = ""
    deleted: bool = False
    """Whether deleted versions that have the schema are listed, too."""


class SubjectsResponse(RegistryResponse, frozen=True, kw_only=True):
    """Names of subjects, the schemas that were asked for, and every context."""

    subjects: Sequence[str] = ()
    schemas: Sequence[SchemaMessage] = ()
    contexts: Sequence[str] = ()


class ListSubjectsRequest(Request[SubjectsResponse], frozen=True, kw_only=True):
    """Asks for the subjects that start with a prefix, `:*:` standing for those of every context."""

    KEY: ClassVar = 32074
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


class SubjectResponse(RegistryResponse, frozen=True, kw_only=True):
    """The versions of a subject, or one version and the ids of the schemas that refer to it."""

    versions: Sequence[int] = ()
    schema: SchemaMessage | None = None
    referrers: Sequence[int] = ()


class GetSubjectRequest(Request[SubjectResponse], frozen=True, kw_only=True):
    """Asks for the versions of a subject, or for one of them."""

    KEY: ClassVar = 32075
    subject: str
    version: str | None = None
    deleted: bool = False
    deleted_only: bool = False
    format: str = ""
    metadata: Mapping[str, str] | None = None
    """Asks for the latest version that has these properties."""


class DeletedResponse(RegistryResponse, frozen=True, kw_only=True):
    """The versions that were deleted."""

    versions: Sequence[int] = ()


class DeleteSubjectRequest(Request[DeletedResponse], frozen=True, kw_only=True):
    """Deletes a subject, or one of its versions."""

    KEY: ClassVar = 32076
    subject: str
    version: str | None = None
    permanent: bool = False


class SettingsResponse(RegistryResponse, frozen=True, kw_only=True):
    """Configuration and mode; None where nothing is set."""

    config: Mapping[str, Any] | None = None
    mode: str | None = None


class GetSettingsRequest(Request[SettingsResponse], frozen=True, kw_only=True):
    """Asks for the settings of a subject, or of the default context."""

    KEY: ClassVar = 32077
    subject: str = ""
    default_to_global: bool = False


class ConfigureRequest(Request[SettingsResponse], frozen=True, kw_only=True):
    """Changes the configuration or the mode of a subject or context; the response has what was set before."""

    KEY: ClassVar = 32078
    subject: str = ""
    config: Mapping[str, Any] | None = None
    mode: str | None = None
    reset_config: bool = False
    reset_mode: bool = False
    force: bool = False
