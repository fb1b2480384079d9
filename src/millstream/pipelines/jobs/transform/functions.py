"""Python functions that a statement calls, registered under their names in its session."""

from __future__ import annotations

import re
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from millstream.core.errors import InvalidSetting
from millstream.core.pipeline import FUNCTIONS_CODE, TransformSettings, named_texts
from millstream.pipelines.jobs.own_job import load_module

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TYPES: Final = {
    "str": "string",
    "int": "bigint",
    "float": "double",
    "bool": "boolean",
    "bytes": "binary",
    "Decimal": "decimal(38,18)",
    "datetime": "timestamp",
    "date": "date",
}
"""Spark's types by the annotations of Python; anything else is a type in Spark's notation."""
_OPTIONAL: Final = re.compile(r"(?:\w+\.)?Optional\[(.*)\]|(.*?)\s*\|\s*None")


def register_functions(spark: SparkSession, settings: TransformSettings) -> None:
    """Make the functions of a statement callable; raise `InvalidSetting` if one cannot be."""
    code = named_texts(FUNCTIONS_CODE, settings.functions_code)
    modules: dict[str, ModuleType] = {}
    for name, module in settings.modules().items():
        if module not in modules:
            modules[module] = _module(module, code.get(module))
        function = getattr(modules[module], name, None)
        if not callable(function):
            raise InvalidSetting(f"module {module!r} has no function {name!r}")
        if hasattr(function, "evalType") and hasattr(function, "returnType"):
            spark.udf.register(name, function)
        else:
            spark.udf.register(name, function, returned_type(name, function))


def returned_type(name: str, function: Any) -> str:
    """Return the type of a function's results, in Spark's notation, by its annotation."""
    given = getattr(function, "__annotations__", {}).get("return")
    if given is None:
        raise InvalidSetting(f"say what function {name!r} returns: `def {name}(…) -> float`")
    is_type = isinstance(given, type)
    text = given.__name__ if is_type else str(given).strip("'\"")
    found = _OPTIONAL.fullmatch(text)
    text = text if found is None else (found[1] or found[2])
    return _TYPES.get(text.rpartition(".")[2], text)


def _module(name: str, code: str | None) -> ModuleType:
    if code is not None:
        return load_module(code, f"millstream_functions_{name.replace('.', '_')}", f"<{name}.py>")
    try:
        return import_module(name)
    except ImportError as error:
        raise InvalidSetting(f"the module {name!r} of a function cannot be imported: {error}") from error
