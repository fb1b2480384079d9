"""Metadata, rule sets and configuration as clients send them: checked, normalized, and merged.

Equal annotations have equal normal forms, so that a schema is found again whether or not its client spells out
defaults. A value of another type is refused with 400, as Confluent's server refuses it; a rule set that contradicts
itself with 42210.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from millstream.core.errors import SchemaRegistryError
from millstream.core.json_problem import plain_problem
from millstream.core.schema import CONFIG_KEYS, LEVELS, RegistryCode, SchemaContent

CONFLUENT_VERSION: Final = "confluent:version"
"""The property that holds the number of the version, for schemas that are registered as a given version."""
RULE_NAME_CHARACTERS_MAX: Final = 64
_WRONG_TYPE: Final = 400

_Scalar = str | int | float | bool
_Mode = Literal["UPGRADE", "DOWNGRADE", "UPDOWN", "WRITE", "READ", "WRITEREAD"]
_MIGRATION: Final = ("UPGRADE", "DOWNGRADE", "UPDOWN")
_DOMAIN: Final = ("WRITE", "READ", "WRITEREAD")
_BOTH_WAYS: Final = ("WRITEREAD", "UPDOWN")


class _Metadata(msgspec.Struct, frozen=True, kw_only=True):
    tags: dict[str, list[str]] | None = None
    properties: dict[str, _Scalar] | None = None
    sensitive: list[str] | None = None


class _Rule(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    name: str | None = None
    doc: str | None = None
    kind: Literal["TRANSFORM", "CONDITION"] | None = None
    mode: _Mode | None = None
    type: str | None = None
    tags: list[str] | None = None
    params: dict[str, _Scalar] | None = None
    expr: str | None = None
    on_success: str | None = None
    on_failure: str | None = None
    disabled: bool | None = None


class _RuleSet(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    migration_rules: list[_Rule] | None = None
    domain_rules: list[_Rule] | None = None
    encoding_rules: list[_Rule] | None = None
    enable_at: str | None = None


class _Config(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    alias: str | None = None
    normalize: bool | None = None
    validate_fields: bool | None = None
    compatibility_level: str | None = None
    compatibility_group: str | None = None
    default_metadata: dict[str, Any] | None = None
    override_metadata: dict[str, Any] | None = None
    default_rule_set: dict[str, Any] | None = None
    override_rule_set: dict[str, Any] | None = None


T = TypeVar("T")


def parse_metadata(value: Any) -> dict[str, Any]:
    metadata = _convert(value, _Metadata, "metadata")
    return _without_empty(
        {
            "tags": {name: sorted(set(metadata.tags[name])) for name in sorted(metadata.tags)}
            if metadata.tags
            else None,
            "properties": _texts(metadata.properties),
            "sensitive": sorted(set(metadata.sensitive or ())),
        }
    )


def parse_rule_set(value: Any) -> dict[str, Any]:
    """Return a rule set in its normal form; raise an error if its rules are invalid."""
    rule_set = _convert(value, _RuleSet, "the rule set")
    names: set[str] = set()
    return _without_empty(
        {
            "migrationRules": _rules("Migration", rule_set.migration_rules, _MIGRATION, names),
            "domainRules": _rules("Domain", rule_set.domain_rules, _DOMAIN, names),
            "encodingRules": _rules("Encoding", rule_set.encoding_rules, _DOMAIN, names),
            "enableAt": rule_set.enable_at,
        }
    )


def parse_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of a configuration, without unknown settings; None resets a setting."""
    parsed = _convert(config, _Config, "the configuration")
    if parsed.compatibility_level is not None and parsed.compatibility_level not in LEVELS:
        raise SchemaRegistryError(
            "Invalid compatibility level. Valid values are none, backward, forward, full, backward_transitive, "
            "forward_transitive, and full_transitive",
            code=RegistryCode.INVALID_LEVEL,
        )
    changes = {key: config[key] for key in config if key in CONFIG_KEYS}
    for key, value in changes.items():
        if value is not None and key.endswith("Metadata"):
            changes[key] = parse_metadata(value)
        elif value is not None and key.endswith("RuleSet"):
            changes[key] = parse_rule_set(value)
    return changes


class Annotation(NamedTuple):
    """A kind of annotation: the field of a schema that holds it, and the end of its names in a configuration."""

    field: str
    key: str


ANNOTATIONS: Final = (Annotation("metadata", "Metadata"), Annotation("rule_set", "RuleSet"))


def has_defaults(config: Mapping[str, Any]) -> bool:
    """Whether a configuration adds something to each schema that is registered."""
    return any(
        config.get(f"{prefix}{annotation.key}") for prefix in ("default", "override") for annotation in ANNOTATIONS
    )


def merge(parts: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Merge metadata or rule sets; the later ones win. None if there is nothing to merge."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    merged: dict[str, Any] = {}
    for part in present:
        for key, value in part.items():
            before = merged.get(key)
            if isinstance(before, dict):
                merged[key] = {**before, **value}
            elif isinstance(before, list) and key.endswith("Rules"):
                names = {element["name"] for element in value}
                merged[key] = [*(element for element in before if element["name"] not in names), *value]
            elif isinstance(before, list):
                merged[key] = sorted({*before, *value})
            else:
                merged[key] = value
    return merged


def property_of(content: SchemaContent, name: str) -> Any:
    return ((content.metadata or {}).get("properties") or {}).get(name)


def with_version(metadata: Mapping[str, Any] | None, version: int) -> dict[str, Any]:
    """Return metadata with the number of its version."""
    properties = {**((metadata or {}).get("properties") or {}), CONFLUENT_VERSION: str(version)}
    return {**(metadata or {}), "properties": dict(sorted(properties.items()))}


def without_version(metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return metadata without the number of a version; None if nothing else remains."""
    if metadata is None:
        return None
    properties = {key: value for key, value in (metadata.get("properties") or {}).items() if key != CONFLUENT_VERSION}
    return _without_empty({**metadata, "properties": properties}) or None


def _rules(noun: str, rules: Sequence[_Rule] | None, modes: Sequence[str], names: set[str]) -> list[dict[str, Any]]:
    checked = []
    for rule in rules or ():
        mode = rule.mode or "WRITEREAD"
        problem = _problem_of_name(rule.name)
        if rule.name in names:
            problem = f"Found rule with duplicate name '{rule.name}'"
        elif problem is None and rule.type is None:
            problem = "Missing rule type"
        elif problem is None and mode not in _BOTH_WAYS and "," in f"{rule.on_success or ''}{rule.on_failure or ''}":
            problem = "Multiple actions only valid with WRITEREAD and UPDOWN"
        elif problem is None and mode not in modes:
            problem = f"{noun} rules can only be {', '.join(modes)}"
        if problem is not None or rule.name is None:
            raise SchemaRegistryError(problem or "Missing rule name", code=RegistryCode.INVALID_RULE_SET)
        names.add(rule.name)
        form = {
            "name": rule.name,
            "doc": rule.doc,
            "kind": rule.kind or "TRANSFORM",
            "mode": mode,
            "type": rule.type,
            "tags": sorted(set(rule.tags or ())),
            "params": _texts(rule.params),
            "expr": rule.expr,
            "onSuccess": rule.on_success,
            "onFailure": rule.on_failure,
        }
        checked.append({**_without_empty(form), "disabled": bool(rule.disabled)})
    return checked


def _problem_of_name(name: str | None) -> str | None:
    if name is None:
        return "Missing rule name"
    if not name:
        return "Empty rule name"
    if len(name) > RULE_NAME_CHARACTERS_MAX:
        return "Rule name too long"
    if not (name[0].isalpha() or name[0] == "_"):
        return f"Illegal initial character in rule name: {name}"
    if not all(character.isalnum() or character in "_-" for character in name):
        return f"Illegal character in rule name: {name}"
    return None


def _texts(values: Mapping[str, _Scalar] | None) -> dict[str, str]:
    """Return values as text, in the order of their names."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in sorted((values or {}).items())
    }


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value not in (None, "", [], {})}


def _convert(value: Any, kind: type[T], what: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise SchemaRegistryError(f"{what} is invalid: {plain_problem(error)}", code=_WRONG_TYPE) from None
