"""Protobuf schemas: compiled by protoc, printed from the descriptor, compared field by field.

Clients send the text of a `.proto` file, or its FileDescriptorProto in base 64. Both are compiled by the protoc of
grpcio-tools, so that every Protobuf compiler accepts what is registered; the canonical text is printed from the
descriptor, without comments.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import grpc_tools
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from google.protobuf.message import DecodeError, Message
from grpc_tools import protoc

from millstream.protocol.schemas.formats import DEPTH_MAX, Difference, InvalidSchema

_FILE: Final = "default.proto"
_BUILT_IN: Final = {
    "confluent/meta.proto": """syntax = "proto3";
package confluent;
import "google/protobuf/descriptor.proto";
message Meta { string doc = 1; map<string, string> params = 2; repeated string tags = 3; }
extend google.protobuf.FileOptions { Meta file_meta = 1088; }
extend google.protobuf.MessageOptions { Meta message_meta = 1088; }
extend google.protobuf.FieldOptions { Meta field_meta = 1088; }
extend google.protobuf.EnumOptions { Meta enum_meta = 1088; }
extend google.protobuf.EnumValueOptions { Meta enum_value_meta = 1088; }
""",
    "confluent/type/decimal.proto": """syntax = "proto3";
package confluent.type;
message Decimal { bytes value = 1; uint32 precision = 2; int32 scale = 3; }
""",
}
"""Files that Confluent's registry knows without a reference."""

_WARNING: Final = re.compile(r"^WARNING:|^[IW]\d{4} |\bwarning:")

_SCALARS: Final = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in FieldDescriptorProto.Type.items()
    if name not in ("TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP")
}
_WIRE: Final = {
    **dict.fromkeys(("int32", "int64", "uint32", "uint64", "bool", "enum"), "GENERAL_NUMBER"),
    **dict.fromkeys(("sint32", "sint64"), "SIGNED_NUMBER"),
    **dict.fromkeys(("string", "bytes"), "STRING_OR_BYTES"),
    **dict.fromkeys(("fixed32", "sfixed32"), "FIXED32"),
    **dict.fromkeys(("fixed64", "sfixed64"), "FIXED64"),
    "float": "FLOAT",
    "double": "DOUBLE",
}
"""Scalar types whose values can be read as each other."""

_REPEATED, _REQUIRED = FieldDescriptorProto.LABEL_REPEATED, FieldDescriptorProto.LABEL_REQUIRED
_MESSAGE, _GROUP = FieldDescriptorProto.TYPE_MESSAGE, FieldDescriptorProto.TYPE_GROUP


class ProtobufSchema:
    """A compiled schema with the files that it imports."""

    def __init__(self, files: Sequence[FileDescriptorProto]) -> None:
        self._files = files
        self.file = files[-1]
        self.types = {name: definition for file in files for name, definition in _types(file)}
        """Every message and enum by its full name, with a leading dot."""

    @classmethod
    def parse(cls, text: str, references: Sequence[tuple[str, str]] = ()) -> ProtobufSchema:
        """Compile a schema whose references are given as file name and text."""
        others = dict(references)
        decoded = _decode_descriptor(text)
        if decoded is not None:
            imported = "".join(f'import "{_checked_path(name)}";\n' for name in decoded.dependency)
            files = _compile(f'syntax = "proto3";\n{imported}', others)
            text = _Printer([*files[:-1], decoded]).print()
        return cls(_compile(text, others))

    def canonical(self) -> str:
        """Return the text, printed from the descriptor."""
        return _Printer(self._files).print()

    def normalized(self) -> str:
        """Return the same text for schemas that differ in the order of imports and fields."""
        file = FileDescriptorProto()
        file.CopyFrom(self.file)
        if not file.public_dependency and not file.weak_dependency:
            file.dependency.sort()
        for message in file.message_type:
            _sort_fields(message)
        return _Printer([*self._files[:-1], file]).print()

    def resolved(self) -> str:
        """Return the text; its imports stay."""
        return self.canonical()

    def serialized(self) -> str:
        return base64.b64encode(self.file.SerializeToString()).decode()

    def descriptors(self) -> str:
        """Return the descriptors of all files, each after those that it imports, in base 64."""
        return base64.b64encode(FileDescriptorSet(file=self._files).SerializeToString()).decode()


def _decode_descriptor(text: str) -> FileDescriptorProto | None:
    """Decode a FileDescriptorProto in base 64; None if the text is not one."""
    try:
        content = base64.b64decode(text.strip(), validate=True)
        descriptor = FileDescriptorProto.FromString(content)
    except (binascii.Error, ValueError, DecodeError):
        return None
    return descriptor if descriptor.message_type or descriptor.enum_type or descriptor.dependency else None


def _checked_path(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or any(character in name for character in '"\\\n\0'):
        raise InvalidSchema(f"{name!r} is not the name of a file that can be imported")
    return name


def _compile(text: str, others: Mapping[str, str]) -> list[FileDescriptorProto]:
    """Compile with protoc; return the descriptors of all files, the last of which is the schema itself."""
    with tempfile.TemporaryDirectory(prefix="millstream-schema-") as folder:
        for name, content in {**_BUILT_IN, **others, _FILE: text}.items():
            path = Path(folder, _checked_path(name))
            decoded = _decode_descriptor(content)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content if decoded is None else _Printer([decoded]).print(), encoding="utf-8")
            except OSError as error:
                # A name that is too long, or also that of a folder.
                raise InvalidSchema(f"{name[:200]!r} cannot be imported: {error.strerror}") from None
        output = Path(folder, ".descriptors")
        known = Path(grpc_tools.__file__).parent / "_proto"
        arguments = [
            "protoc",
            f"-I{folder}",
            f"-I{known}",
            f"--descriptor_set_out={output}",
            "--include_imports",
            _FILE,
        ]
        code, messages = _with_errors(lambda: int(protoc.main(arguments)))
        if code:
            raise InvalidSchema(_first_errors(messages, folder))
        return list(FileDescriptorSet.FromString(output.read_bytes()).file)


def _with_errors(work: Callable[[], int]) -> tuple[int, str]:
    """Run native code and capture its standard error."""
    with tempfile.TemporaryFile() as caught:
        stderr_copy = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            code = work()
        finally:
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)
        caught.seek(0)
        return code, caught.read(64 * 1024).decode(errors="replace")


def _first_errors(messages: str, folder: str) -> str:
    lines = [line.replace(f"{folder}/", "").removeprefix(f"{_FILE}:") for line in messages.splitlines()]
    lines = [line for line in lines if not _WARNING.search(line)]
    return "; ".join(lines[:5])[:2000] or "protoc rejects the schema"


def _sort_fields(message: DescriptorProto) -> None:
    message.field.sort(key=lambda field: field.number)
    for nested in message.nested_type:
        _sort_fields(nested)


def _types(file: FileDescriptorProto) -> Iterator[tuple[str, DescriptorProto | EnumDescriptorProto]]:
    prefix = f".{file.package}" if file.package else ""
    waiting = [(prefix, message) for message in file.message_type]
    yield from ((f"{prefix}.{enum.name}", enum) for enum in file.enum_type)
    for parent, message in waiting:
        name = f"{parent}.{message.name}"
        yield name, message
        yield from ((f"{name}.{enum.name}", enum) for enum in message.enum_type)
        waiting += [(name, nested) for nested in message.nested_type]


class _Printer:
    """Prints a file descriptor as a `.proto` file."""

    def __init__(self, files: Sequence[FileDescriptorProto]) -> None:
        self._plain = files[-1]
        self._symbols = {""}
        for file in files:
            package = file.package.split(".") if file.package else []
            self._symbols |= {"." + ".".join(package[: end + 1]) for end in range(len(package))}
            self._symbols |= {name for name, _type in _types(file)}
        self._file: Any = _with_known_options(files)
        self._lines: list[str] = []

    def print(self) -> str:
        file = self._file
        if file.syntax == "editions":
            edition = descriptor_pb2.Edition.Name(self._plain.edition).removeprefix("EDITION_")
            self._lines.append(f'edition = "{edition}";')
        else:
            self._lines.append(f'syntax = "{file.syntax or "proto2"}";')
        if file.package:
            self._lines.append(f"package {file.package};")
        if file.dependency:
            self._lines.append("")
        for index, name in enumerate(file.dependency):
            how = "public " if index in file.public_dependency else "weak " if index in file.weak_dependency else ""
            self._lines.append(f'import {how}"{name}";')
        options = _options(file.options)
        if options:
            self._lines += ["", *(f"option {option};" for option in options)]
        scope = f".{file.package}" if file.package else ""
        for message in file.message_type:
            self._lines.append("")
            self._message(message, scope, 0)
        for enum in file.enum_type:
            self._lines.append("")
            self._enum(enum, 0)
        self._extensions(file.extension, scope, 0)
        for service in file.service:
            self._lines.append("")
            self._service(service, scope)
        return "\n".join(self._lines) + "\n"

    def _add(self, depth: int, line: str) -> None:
        self._lines.append("  " * depth + line)

    def _message(self, message: Any, scope: str, depth: int, *, head: str = "") -> None:
        if depth > DEPTH_MAX:
            raise InvalidSchema(f"messages are nested more than {DEPTH_MAX} levels deep")
        name = f"{scope}.{message.name}"
        nested = {f"{name}.{nested_type.name}": nested_type for nested_type in message.nested_type}
        groups = {field.type_name for field in [*message.field, *message.extension] if field.type == _GROUP}
        self._add(depth, head or f"message {message.name} {{")
        for option in _options(message.options, leave_out=("map_entry",)):
            self._add(depth + 1, f"option {option};")
        self._reserved(message, depth + 1, end_is_exclusive=True)
        for span in message.extension_range:
            self._add(
                depth + 1,
                f"extensions {_range(span.start, span.end - 1, 2**29 - 1)}{_bracketed(_options(span.options))};",
            )
        members: dict[int, list[Any]] = {}
        for field in message.field:
            if field.HasField("oneof_index") and not field.proto3_optional:
                members.setdefault(field.oneof_index, []).append(field)
        for field in message.field:
            index = field.oneof_index if field.HasField("oneof_index") and not field.proto3_optional else None
            if index is None:
                self._field(field, name, nested, depth + 1)
            elif members[index][0] is field or members[index][0].number == field.number:
                self._add(depth + 1, f"oneof {message.oneof_decl[index].name} {{")
                for option in _options(message.oneof_decl[index].options):
                    self._add(depth + 2, f"option {option};")
                for member in members[index]:
                    self._field(member, name, nested, depth + 2, is_member=True)
                self._add(depth + 1, "}")
        self._extensions(message.extension, name, depth + 1)
        for full_name, descriptor in nested.items():
            if not descriptor.options.map_entry and full_name not in groups:
                self._message(descriptor, name, depth + 1)
        for enum in message.enum_type:
            self._enum(enum, depth + 1)
        self._add(depth, "}")

    def _field(self, field: Any, scope: str, nested: Mapping[str, Any], depth: int, *, is_member: bool = False) -> None:
        label = "" if is_member else self._label(field)
        options = _options(field.options)
        if field.HasField("default_value"):
            options.insert(0, f"default = {self._default(field)}")
        if field.HasField("json_name") and field.json_name != _json_name(field.name):
            options.insert(0, f"json_name = {_quoted(field.json_name)}")
        entry = nested.get(field.type_name)
        if field.type == _GROUP and entry is not None:
            head = f"{label}group {entry.name} = {field.number}{_bracketed(options)} {{"
            self._message(entry, scope, depth, head=head)
            return
        if entry is not None and entry.options.map_entry:
            key, value = (self._type(field, scope) for field in entry.field)
            kind, label = f"map<{key}, {value}>", ""
        else:
            kind = self._type(field, scope)
        self._add(depth, f"{label}{kind} {field.name} = {field.number}{_bracketed(options)};")

    def _label(self, field: Any) -> str:
        if field.label == _REPEATED:
            return "repeated "
        if field.label == _REQUIRED:
            return "required "
        is_explicit = field.proto3_optional or self._file.syntax in ("", "proto2")
        return "optional " if is_explicit else ""

    def _default(self, field: Any) -> str:
        if field.type == FieldDescriptorProto.TYPE_STRING:
            return _quoted(field.default_value)
        # Bytes are already written with escapes.
        return f'"{field.default_value}"' if field.type == FieldDescriptorProto.TYPE_BYTES else str(field.default_value)

    def _type(self, field: Any, scope: str) -> str:
        return _SCALARS.get(field.type) or self._relative(field.type_name, scope)

    def _relative(self, name: str, scope: str) -> str:
        """Return the shortest way to write a type's name that means this type here."""
        outer = scope
        while True:
            candidate = name.removeprefix(f"{outer}.")
            if not candidate.startswith(".") and self._meaning(candidate, scope) == name:
                return candidate
            if not outer:
                return name
            outer = outer.rpartition(".")[0]

    def _meaning(self, name: str, scope: str) -> str:
        first = name.partition(".")[0]
        while True:
            if f"{scope}.{first}" in self._symbols:
                return f"{scope}.{name}"
            if not scope:
                return ""
            scope = scope.rpartition(".")[0]

    def _enum(self, enum: Any, depth: int) -> None:
        self._add(depth, f"enum {enum.name} {{")
        for option in _options(enum.options):
            self._add(depth + 1, f"option {option};")
        self._reserved(enum, depth + 1, end_is_exclusive=False)
        for value in enum.value:
            self._add(depth + 1, f"{value.name} = {value.number}{_bracketed(_options(value.options))};")
        self._add(depth, "}")

    def _reserved(self, owner: Any, depth: int, *, end_is_exclusive: bool) -> None:
        top = 2**29 - 1 if end_is_exclusive else 2**31 - 1
        spans = [_range(span.start, span.end - end_is_exclusive, top) for span in owner.reserved_range]
        if spans:
            self._add(depth, f"reserved {', '.join(spans)};")
        if owner.reserved_name:
            is_bare = self._file.syntax == "editions"
            self._add(
                depth,
                f"reserved {', '.join(name if is_bare else _quoted(name) for name in owner.reserved_name)};",
            )

    def _extensions(self, fields: Sequence[Any], scope: str, depth: int) -> None:
        for extended in dict.fromkeys(field.extendee for field in fields):
            self._add(depth, f"extend {self._relative(extended, scope)} {{")
            for field in fields:
                if field.extendee == extended:
                    self._field(field, scope, {}, depth + 1)
            self._add(depth, "}")

    def _service(self, service: Any, scope: str) -> None:
        self._add(0, f"service {service.name} {{")
        for option in _options(service.options):
            self._add(1, f"option {option};")
        for method in service.method:
            taken = ("stream " if method.client_streaming else "") + self._relative(method.input_type, scope)
            output = ("stream " if method.server_streaming else "") + self._relative(method.output_type, scope)
            options = _options(method.options)
            end = ";" if not options else " {"
            self._add(1, f"rpc {method.name} ({taken}) returns ({output}){end}")
            for option in options:
                self._add(2, f"option {option};")
            if options:
                self._add(1, "}")
        self._add(0, "}")


def _with_known_options(files: Sequence[FileDescriptorProto]) -> Any:
    """Decode a file's descriptor again so that the options which its imports define have names."""
    pool = descriptor_pool.DescriptorPool()
    try:
        names = {file.name for file in files}
        if "google/protobuf/descriptor.proto" not in names:
            pool.AddSerializedFile(descriptor_pb2.DESCRIPTOR.serialized_pb)
        for file in files:
            pool.Add(file)
        kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("google.protobuf.FileDescriptorProto"))
        return kind.FromString(files[-1].SerializeToString())
    except (TypeError, KeyError, DecodeError):
        # Imports of the descriptor are missing; protoc reports the error.
        return files[-1]


def _options(options: Message, *, leave_out: Sequence[str] = ()) -> list[str]:
    printed = []
    for field, value in options.ListFields():
        if field.name in leave_out and not field.is_extension:
            continue
        name = f"({field.full_name})" if field.is_extension else field.name
        values = list(value) if field.is_repeated else [value]
        printed += [f"{name} = {_option_value(field, value)}" for value in values]
    return printed


def _option_value(field: Any, value: Any) -> str:
    if field.message_type is not None:
        return f"{{ {text_format.MessageToString(value, as_one_line=True)} }}"
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[value].name)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return (
            '"'
            + "".join(f"\\{byte:03o}" if not 32 <= byte < 127 or byte in b'"\\' else chr(byte) for byte in value)
            + '"'
        )
    return _quoted(value) if isinstance(value, str) else str(value)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _bracketed(options: Sequence[str]) -> str:
    return f" [{', '.join(options)}]" if options else ""


def _range(first: int, last: int, top: int) -> str:
    if first == last:
        return str(first)
    return f"{first} to {'max' if last >= top else last}"


def _json_name(name: str) -> str:
    parts = name.split("_")
    return parts[0] + "".join(part[:1].upper() + part[1:] for part in parts[1:])


def compare(reader: ProtobufSchema, writer: ProtobufSchema) -> list[Difference]:
    """Return why the reader cannot read the writer's data; empty if it can."""
    comparison = _Comparison(writer, reader)
    comparison.compare_files()
    return [Difference(kind, f"At {path}, {_DESCRIPTIONS[kind]}") for kind, path in comparison.found]


_DESCRIPTIONS: Final = {
    "PACKAGE_CHANGED": "the {reader} schema has another package than the {writer} one",
    "MESSAGE_REMOVED": "the {reader} schema lacks a message of the {writer} one",
    "FIELD_KIND_CHANGED": "a field of the {reader} schema is of another kind than in the {writer} one",
    "FIELD_SCALAR_KIND_CHANGED": "a scalar field of the {reader} schema cannot read that of the {writer} one",
    "FIELD_NAMED_TYPE_CHANGED": "a field of the {reader} schema has another named type than in the {writer} one",
    "FIELD_NUMERIC_LABEL_CHANGED": "a numeric field of the {reader} schema has another label than in the {writer} one",
    "REQUIRED_FIELD_ADDED": "the {reader} schema requires a field that the {writer} one lacks",
    "REQUIRED_FIELD_REMOVED": "the {reader} schema lacks a field that the {writer} one requires",
    "ONEOF_FIELD_REMOVED": "the {reader} schema lacks a field of a oneof of the {writer} one",
    "MULTIPLE_FIELDS_MOVED_TO_ONEOF": "a oneof of the {reader} schema holds several fields of the {writer} one",
    "FIELD_MOVED_TO_EXISTING_ONEOF": "a oneof of the {reader} schema has one more field of the {writer} one",
}
"""The differences that make schemas incompatible; compatible ones are not recorded."""


class _Comparison:
    """Compares an original, the writer's schema, with an update, the reader's."""

    def __init__(self, original: ProtobufSchema, update: ProtobufSchema) -> None:
        self._original = original
        self._update = update
        self._seen: set[tuple[int, int]] = set()
        self.found: list[tuple[str, str]] = []

    def compare_files(self) -> None:
        original, update = self._original.file, self._update.file
        if original.package != update.package:
            self._note("PACKAGE_CHANGED", "#/")
        self._nested(original.message_type, update.message_type, "#")

    def _note(self, kind: str, path: str) -> None:
        self.found.append((kind, path))

    def _nested(self, original: Sequence[DescriptorProto], update: Sequence[DescriptorProto], path: str) -> None:
        after = {message.name: message for message in update}
        for message in original:
            if message.options.map_entry:
                continue
            other = after.get(message.name)
            if other is None:
                self._note("MESSAGE_REMOVED", f"{path}/{message.name}")
            else:
                self._messages(message, other, f"{path}/{message.name}")

    def _messages(self, original: DescriptorProto, update: DescriptorProto, path: str) -> None:
        pair = (id(original), id(update))
        if pair in self._seen:
            return
        self._seen.add(pair)
        before, after = ({field.number: field for field in message.field} for message in (original, update))
        self._oneofs(original, update, path)
        for number in sorted(before.keys() | after.keys()):
            place = f"{path}/{number}"
            if number not in after:
                self._removed(original, update, before[number], place)
            elif number not in before:
                if after[number].label == _REQUIRED:
                    self._note("REQUIRED_FIELD_ADDED", place)
            else:
                self._fields(before[number], after[number], place)
        self._nested(original.nested_type, update.nested_type, path)

    def _removed(
        self, original: DescriptorProto, update: DescriptorProto, field: FieldDescriptorProto, path: str
    ) -> None:
        oneof = _oneof_of(original, field)
        if oneof is not None and any(declared.name == oneof for declared in update.oneof_decl):
            self._note("ONEOF_FIELD_REMOVED", path)
        elif field.label == _REQUIRED:
            self._note("REQUIRED_FIELD_REMOVED", path)

    def _oneofs(self, original: DescriptorProto, update: DescriptorProto, path: str) -> None:
        """A oneof may gain one field that was in no oneof, unless it also holds fields that were in one."""
        before = {field.number: _oneof_of(original, field) for field in original.field}
        members: dict[str, list[int]] = {}
        for field in update.field:
            oneof = _oneof_of(update, field)
            if oneof is not None and field.number in before:
                members.setdefault(oneof, []).append(field.number)
        for oneof, numbers in members.items():
            moved = sum(before[number] is None for number in numbers)
            if moved > 1:
                self._note("MULTIPLE_FIELDS_MOVED_TO_ONEOF", f"{path}/{oneof}")
            elif moved == 1 and moved < len(numbers):
                self._note("FIELD_MOVED_TO_EXISTING_ONEOF", f"{path}/{oneof}")

    def _fields(self, original: FieldDescriptorProto, update: FieldDescriptorProto, path: str) -> None:
        before, after = self._kind(original, self._original), self._kind(update, self._update)
        if before != after:
            self._note("FIELD_KIND_CHANGED", path)
        elif before == "scalar":
            kinds = _WIRE[_SCALARS.get(original.type, "enum")], _WIRE[_SCALARS.get(update.type, "enum")]
            if kinds[0] != kinds[1]:
                self._note("FIELD_SCALAR_KIND_CHANGED", path)
            elif kinds[0] != "STRING_OR_BYTES" and (original.label == _REPEATED) != (update.label == _REPEATED):
                self._note("FIELD_NUMERIC_LABEL_CHANGED", path)
        elif before == "map":
            entries = _message(original, self._original), _message(update, self._update)
            for key, other in zip(entries[0].field, entries[1].field, strict=True):
                self._fields(key, other, path)
        else:
            self._named_types(original, update, path)

    def _named_types(self, original: FieldDescriptorProto, update: FieldDescriptorProto, path: str) -> None:
        names = _local_name(original.type_name, self._original), _local_name(update.type_name, self._update)
        if names[0] != names[1]:
            self._note("FIELD_NAMED_TYPE_CHANGED", path)
            return
        noted = len(self.found)
        self._messages(_message(original, self._original), _message(update, self._update), f"#/{names[0]}")
        if len(self.found) > noted:
            self._note("FIELD_NAMED_TYPE_CHANGED", path)

    def _kind(self, field: FieldDescriptorProto, schema: ProtobufSchema) -> str:
        if field.type not in (_MESSAGE, _GROUP):
            return "scalar"
        return "map" if _message(field, schema).options.map_entry else "message"


def _message(field: FieldDescriptorProto, schema: ProtobufSchema) -> DescriptorProto:
    definition = schema.types.get(field.type_name)
    if not isinstance(definition, DescriptorProto):
        raise InvalidSchema(f"the type {field.type_name} is not defined")
    return definition


def _local_name(name: str, schema: ProtobufSchema) -> str:
    """Return the name of a message without the package of the file that defines it."""
    parts = name[1:].split(".")
    for start in range(len(parts)):
        if "." + ".".join(parts[: start + 1]) in schema.types:
            return ".".join(parts[start:])
    return name


def _oneof_of(message: DescriptorProto, field: FieldDescriptorProto) -> str | None:
    if not field.HasField("oneof_index") or field.proto3_optional:
        return None
    return str(message.oneof_decl[field.oneof_index].name)
