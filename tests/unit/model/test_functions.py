"""Python functions in statements: how they are named, and which are refused before anything runs."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Optional
from uuid import uuid4

import pytest

from millstream.core.errors import InvalidSetting
from millstream.core.job import parse_functions
from millstream.core.pipeline import Pipeline, PipelineKind, check_pipeline
from millstream.pipelines.jobs.transform.prepared_query import returned_type

CODE = (
    "def vat(total) -> float:\n    return total * 0.2\n\n\ndef bare(total):\n    return total\n\n\nshout = str.upper\n"
)
SQL = {"sql": "SELECT vat(total) AS vat FROM orders", "into": "taxed"}


def test_functions_have_modules() -> None:
    assert parse_functions("prices:vat, prices:shout,package.text:slug", {"prices": CODE}) == {
        "vat": "prices",
        "shout": "prices",
        "slug": "package.text",
    }


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("vat", {}, "module:function"),
        ("prices:no such", {}, "module:function"),
        ("prices:vat,other:vat", {}, "two functions"),
        ("prices:missing", {"prices": CODE}, "defines no function 'missing'"),
        ("prices:bare", {"prices": CODE}, "line 5: declare what bare returns"),
        ("prices:vat", {"prices": "def vat(:"}, "not Python"),
        ("prices:vat", {"prices": "async def vat() -> int: ..."}, "must not be async"),
        ("prices:vat", {"prices": CODE, "more": CODE}, "none of its functions is listed"),
    ],
)
def test_an_object_that_is_not_callable_is_refused(text: str, code: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        parse_functions(text, code)


def test_a_statement_with_functions_has_its_own_driver() -> None:
    overrides = {**SQL, "functions": "prices:vat", "functions.code": json.dumps({"prices": CODE}), "memory": "512m"}
    check_pipeline("taxes", PipelineKind.TRANSFORM, overrides)
    pipeline = Pipeline(pipeline_id=uuid4(), name="taxes", kind=PipelineKind.TRANSFORM, overrides=overrides)
    assert pipeline.has_own_driver
    assert (pipeline.job_settings.continuous, pipeline.job_settings.memory) == (True, "512m")
    plain = Pipeline(pipeline_id=uuid4(), name="plain", kind=PipelineKind.TRANSFORM, overrides=SQL)
    assert not plain.has_own_driver
    with pytest.raises(InvalidSetting, match="no separate driver"):
        _ = plain.job_settings
    with pytest.raises(InvalidSetting, match="packages of `functions`"):
        check_pipeline("plain", PipelineKind.TRANSFORM, {**SQL, "requirements": "humanize"})


def test_results_have_the_type_of_the_annotation() -> None:
    def when() -> datetime: ...  # type: ignore[empty-body]

    def optional_float() -> Optional[float]: ...  # noqa: UP045

    def optional_int() -> int | None: ...

    def nothing(): ...  # type: ignore[no-untyped-def]

    kinds = [returned_type("f", function) for function in (when, optional_float, optional_int)]
    assert kinds == ["timestamp", "double", "bigint"]
    optional_int.__annotations__["return"] = "'array<string>'"
    assert returned_type("f", optional_int) == "array<string>"
    with pytest.raises(InvalidSetting, match="declare what"):
        returned_type("f", nothing)
