"""Event times: which values are valid, their partition, and the quarantine reason of messages without one."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.errors import InvalidSetting
from millstream.core.payload_columns import EventTime
from millstream.core.pipeline import LandSettings
from millstream.pipelines.jobs.land import event_time
from millstream.pipelines.jobs.land.event_time import EventFolders, EventTimeRule, event_times
from millstream.pipelines.jobs.land.task import reason_kind

MOMENT = datetime(2026, 11, 15, 21, 30, 1, 250_000, tzinfo=UTC)
FIRST_US = -62_135_596_800_000_000
MILLISECONDS = 1_794_778_201_250


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (MOMENT, pa.timestamp("us", tz="UTC"), MOMENT),
        (MOMENT.replace(tzinfo=None), pa.timestamp("us"), MOMENT),
        (date(2026, 11, 15), pa.date32(), datetime(2026, 11, 15, tzinfo=UTC)),
        ("2026-11-15T21:30:01.250Z", pa.string(), MOMENT),
        ("2026-11-15T22:30:01.250+01:00", pa.string(), MOMENT),
        ("2026-11-15 21:30:01.250", pa.string(), MOMENT),
        ("2026-11-15T21:30:01.250000999Z", pa.string(), MOMENT),
        ("2026-11-15", pa.string(), datetime(2026, 11, 15, tzinfo=UTC)),
        ("2024-02-29T12+0100", pa.string(), datetime(2024, 2, 29, 11, tzinfo=UTC)),
        ("2000-02-29 12:30-01", pa.string(), datetime(2000, 2, 29, 13, 30, tzinfo=UTC)),
        ("2023-02-29", pa.string(), None),
        ("1900-02-29", pa.string(), None),
        ("2026-04-31T00:00:00Z", pa.string(), None),
        ("2026-11-15T24:00:00", pa.string(), None),
        ("2026-11-15T21:30:60", pa.string(), None),
        ("2026-11-15T21:30:00+24:00", pa.string(), None),
        ("2026-11-15\n", pa.string(), None),
        ("1969-12-31T23:59:59Z", pa.string(), datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)),
        (MILLISECONDS, pa.int64(), MOMENT),
        (float(MILLISECONDS), pa.float64(), MOMENT),
        (Decimal(MILLISECONDS), pa.decimal128(38, 0), MOMENT),
        (MILLISECONDS // 1000, pa.int64(), None),
        (2**62, pa.int64(), None),
        (float("nan"), pa.float64(), None),
        ("yesterday", pa.string(), None),
        ("", pa.string(), None),
        ("12 EUR", pa.string(), None),
        (None, pa.string(), None),
        (True, pa.bool_(), None),
        ([1], pa.list_(pa.int64()), None),
    ],
)
def test_a_value_is_a_time_or_refused(value: Any, kind: pa.DataType, expected: datetime | None) -> None:
    assert event_times(pa.array([value], kind)).to_pylist() == [expected]


Texts = st.one_of(
    st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)).map(lambda moment: (moment.isoformat(), moment)),
    st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)).map(
        lambda moment: (moment.isoformat() + "+02:00", moment - timedelta(hours=2))
    ),
    st.sampled_from(["", "x", "2026-13-01", "2026", "{}", "ä"]).map(lambda text: (text, None)),
    st.none().map(lambda _: (None, None)),
)


@given(st.lists(Texts, max_size=30))
def test_a_text_is_parsed_independently_of_its_batch(given_texts: list[tuple[str | None, datetime | None]]) -> None:
    times = event_times(pa.array([text for text, _moment in given_texts], pa.string())).to_pylist()
    assert times == [None if moment is None else moment.replace(tzinfo=UTC) for _text, moment in given_texts]


_DIGITS = st.one_of(st.integers(0, 32), st.integers(0, 99)).map("{:02}".format)
_PARTS = st.tuples(st.sampled_from(["0000", "1900", "2000", "2023", "2024"]), *[_DIGITS] * 5)


@given(
    _PARTS, st.sampled_from(["", "Z", "+01", "-23:59", "+24:00", "+0160"]), st.sampled_from(["", ".5", ".", ".123456"])
)
def test_a_text_is_a_time_if_arrow_can_parse_it(parts: tuple[str, ...], zone: str, fraction: str) -> None:
    year, month, day, hour, minute, second = parts
    text = f"{year}-{month}-{day}T{hour}:{minute}:{second}{fraction}{zone}"
    expected = None
    with suppress(pa.ArrowInvalid):
        expected = pa.array([text]).cast(pa.timestamp("us", tz="UTC" if zone else None))[0].value
    time_value = event_times(pa.array([text, "x"]))[0].value
    assert time_value == (expected if expected is None or expected >= FIRST_US else None)


def test_rows_get_the_partition_of_their_time_or_a_reason() -> None:
    times = ["2026-11-15T23:59:59Z", "1969-12-31T23:00:00Z", None, "soon", "2026-11-16T00:00:00Z"]
    rows = pa.RecordBatch.from_pydict({"Created_At": pa.array(times, pa.string())})
    known = pa.array([None, None, None, None, "the payload is not JSON"], pa.string())
    found, reasons = EventTimeRule(EventTime("hour", "created_at")).apply(rows, known)
    assert found.column("event_day").to_pylist()[:2] == [date(2026, 11, 15), date(1969, 12, 31)]
    assert found.column("event_hour").to_pylist()[:2] == [23, 23]
    assert reasons.to_pylist() == [
        None,
        None,
        "created_at is missing or null, and the table is partitioned by it",
        'created_at: "soon" is not a time, and the table is partitioned by it',
        "the payload is not JSON",
    ]
    assert [reason_kind(text) for text in reasons.to_pylist()[2:]] == ["no-time", "no-time", "not-json"]


def test_one_task_writes_to_a_limited_number_of_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_time, "FOLDERS_MAX", 3)
    rule, folders = EventTimeRule(EventTime("hour", "at")), EventFolders("hour", MOMENT.timestamp)

    def landed(hours: list[int | None]) -> list[bool]:
        times = [None if hour is None else MOMENT + timedelta(hours=hour) for hour in hours]
        rows = pa.RecordBatch.from_pydict({"at": pa.array(times, pa.timestamp("us", tz="UTC"))})
        found_times, reasons = rule.apply(rows, pa.nulls(len(hours), pa.string()))
        limited = folders.limit(found_times, reasons).to_pylist()
        kinds = [None if text is None else reason_kind(text) for text in limited]
        assert {kind for kind in kinds if kind} <= {"no-time", "too-many-times"}
        assert [kind == "no-time" for kind in kinds] == [hour is None for hour in hours]
        return [kind is None for kind in kinds]

    far = 100_000
    # Folders around the present are not counted.
    assert landed([0, None, -1, 2, 24, far, far + 1]) == [True, False, True, True, True, True, True]
    assert landed([far + 2, far + 3, far + 3, far, 5]) == [False, True, True, True, True]
    assert landed([far + 4, -far, far + 3, far + 1, -100]) == [False, False, True, True, True]


def test_a_nested_field_or_none_at_all() -> None:
    order = pa.array([{"at": MOMENT}, None, {"at": None}], pa.struct([("at", pa.timestamp("us", tz="UTC"))]))
    rows = pa.RecordBatch.from_pydict({"order": order})
    times, reasons = EventTimeRule(EventTime("day", "order.at")).apply(rows, pa.nulls(3, pa.string()))
    assert times.column("event_day").to_pylist() == [date(2026, 11, 15), None, None]
    assert [reason is None for reason in reasons.to_pylist()] == [True, False, False]
    _found, reasons = EventTimeRule(EventTime("day", "order.sent")).apply(rows, pa.nulls(3, pa.string()))
    assert reasons.null_count == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("created_at", "day(created_at)"),
        ("day(created_at)", "day(created_at)"),
        (" HOUR ( order.at ) ", "hour(order.at)"),
    ],
)
def test_the_setting_is_parsed(text: str, expected: str) -> None:
    assert str(EventTime.parse(text)) == expected


@pytest.mark.parametrize(
    ("given_settings", "reason"),
    [
        ({"partition.by": "month(created_at)", "decode": "json"}, r"day\(COLUMN\)"),
        ({"partition.by": "day(a, b)("}, r"day\(COLUMN\)"),
        ({"partition.by": "day(.a)", "decode": "json"}, r"day\(COLUMN\)"),
        ({"partition.by": "created_at"}, "payloads are not decoded"),
        ({"partition.by": "created_at", "mode": "upsert", "decode": "json"}, "another time"),
        ({"partition.by": "created_at", "decode": "json", "schema": "id long"}, "does not have"),
        ({"partition.by": "id", "decode": "json", "schema": "id boolean"}, "declares as boolean"),
    ],
)
def test_an_invalid_setting_is_refused(given_settings: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        LandSettings.from_strings({"topics": "orders", **given_settings}).check_texts()


def test_the_time_of_the_message_needs_no_decoding() -> None:
    settings = LandSettings.from_strings({"topics": "orders", "partition.by": "hour(timestamp)"})
    settings.check_texts()
    given_schema = {"decode": "json", "schema": "order struct<at timestamp>", "partition.by": "order.at"}
    LandSettings.from_strings({"topics": "orders", **given_schema}).check_texts()
