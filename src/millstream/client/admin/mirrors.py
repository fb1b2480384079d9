"""Operations on mirrors, over Millstream's private requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from millstream.client.admin.cluster_status import ask_all_nodes
from millstream.core.backoff import Backoff
from millstream.core.errors import InvalidMirror, MirrorExists, RequestTimedOut, SubscriptionExists
from millstream.core.ids import NodeId
from millstream.core.regex import compile_regex
from millstream.protocol.private.message import Request, Response, request_private
from millstream.protocol.private.mirror_messages import (
    AlterMirrorRequest,
    CreateMirrorRequest,
    DeleteMirrorRequest,
    FailoverRequest,
    FailoverResponse,
    ListMirrorsRequest,
    ReverseRequest,
    ReverseResponse,
    SwitchRequest,
)
from millstream.protocol.wire.client import Client

SETTLE_CHECK_S: Final = 0.5

R = TypeVar("R", bound=Response)


class MirrorClient:
    """Declares, changes and describes mirrors, and changes their direction."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def create(self, name: str, settings: Mapping[str, str], *, is_enabled: bool = True) -> None:
        await self._request(None, CreateMirrorRequest(name=name, settings=dict(settings), enabled=is_enabled))

    async def start_problems(self, name: str, *, wait_s: float) -> tuple[str, list[str]]:
        """Wait until a mirror has compared the topics; return why it does not run, and its problems."""
        loop = asyncio.get_running_loop()
        started, backoff = loop.time(), Backoff(max_s=SETTLE_CHECK_S)
        while True:
            (described,) = await self.describe([name])
            is_late = loop.time() - started > wait_s
            if described["state"] == "running" and (described["is_listed"] or is_late):
                return "", described["problems"]
            if described["error"] or is_late:
                return str(described["error"]) or "the source has not responded", []
            await backoff.pause()

    async def alter(self, name: str, settings: Mapping[str, str | None]) -> None:
        """Change settings; None resets one to its default."""
        await self._request(None, AlterMirrorRequest(name=name, settings=dict(settings)))

    async def set_enabled(self, name: str, *, is_enabled: bool) -> None:
        await self._request(None, AlterMirrorRequest(name=name, enabled=is_enabled))

    async def delete(self, name: str, *, force: bool = False) -> None:
        """Delete a mirror without copies; one that is the way back after a failover only with `force`."""
        await self._request(None, DeleteMirrorRequest(name=name, force=force))

    async def fail_over(
        self, name: str, topics: Sequence[str] | None = None, *, is_planned: bool = False
    ) -> FailoverResponse:
        """Make copies writable; topics are regular expressions for names, None means all.

        With `is_planned`, the last offsets of groups are fetched from the source first, which has to be reachable.
        """
        body = FailoverRequest(name=name, topics=None if topics is None else list(topics), is_planned=is_planned)
        return await self._request(None, body)

    async def reverse(self, request: ReverseRequest) -> ReverseResponse:
        """Make the old source follow this cluster."""
        return await self._request(None, request)

    async def switch(self, request: ReverseRequest) -> ReverseResponse:
        """Reverse the direction of a mirror without losing anything."""
        return await self._request(None, SwitchRequest(**msgspec.structs.asdict(request)))

    async def settle(
        self, name: str, topics: Sequence[str] | None = None, *, wait_s: float, idle_s: float
    ) -> float | None:
        """Wait until copies have everything and their originals were not written to for a while; return how long.

        Topics are regular expressions for names, None means all. None is returned if a failover of all of them has
        begun or ended: nothing is copied any more. Raise `RequestTimedOut` if it took too long.
        """
        patterns = [compile_regex(pattern) for pattern in topics or ()]
        loop = asyncio.get_running_loop()
        started = idle_since = loop.time()
        ends: dict[tuple[str, int], int] = {}
        while True:
            (described,) = await self.describe([name])
            if topics is not None:
                described = _select_copies(
                    described, lambda topic: any(pattern.fullmatch(topic) for pattern in patterns)
                )
                if not described["copies"] and not described["cuts"]:
                    raise InvalidMirror(f"mirror {name!r} has no copies that match {', '.join(topics)}")
            if described["copies"].keys() <= set(described["cutting"]) and (described["copies"] or described["cuts"]):
                return None
            now = {
                (partition["topic"], partition["partition"]): partition["source_end"]
                for partition in described["partitions"]
            }
            failing = described["error"] and not described["interrupted"]
            if now != ends or not now or described["lag"] or described["lag_unknown"] or failing:
                ends, idle_since = now, loop.time()
            elif loop.time() - idle_since >= idle_s:
                return loop.time() - started
            if loop.time() - started > wait_s + idle_s:
                why = described["error"] or (
                    f"lag {described['lag']}, unknown for {described['lag_unknown']} partitions; the source may still "
                    "be written to"
                )
                raise RequestTimedOut(f"mirror {name!r} was not idle within {wait_s:g} s ({why})")
            await asyncio.sleep(SETTLE_CHECK_S)

    async def original_of(self, copy: str) -> dict[str, str] | None:
        """Return the mirror that writes a topic, and the topic of its source; None if it is not a copy."""
        for mirror in (await self._request(None, ListMirrorsRequest())).mirrors:
            if copy in mirror["copies"]:
                return {"mirror": mirror["name"], "topic": copy.removeprefix(mirror["settings"]["rename"])}
        return None

    async def describe(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return mirrors with the reports of all nodes; a node that does not respond is named in `notes`.

        `problems` are the notes that something is not mirrored.
        """
        body = ListMirrorsRequest(names=None if names is None else list(names))
        responses, failed = await ask_all_nodes(self._client, lambda node: self._request(node, body))
        by_name: dict[str, list[dict[str, Any]]] = {}
        for response in responses:
            for mirror in response.mirrors:
                by_name.setdefault(mirror["name"], []).append(mirror)
        if not by_name and failed:
            raise failed[0]
        return [_merge_reports(reports, [str(error) for error in failed]) for _, reports in sorted(by_name.items())]

    async def _request(self, node: NodeId | None, request: Request[R]) -> R:
        try:
            return await request_private(self._client, node, request, waits=True)
        except SubscriptionExists as error:
            # Its code stands for any name that is taken.
            raise MirrorExists(str(error)) from None


def summary_of(described: Mapping[str, Any]) -> dict[str, Any]:
    error = described["error"] or "; ".join(described["problems"])
    return {**described, "topics": len(described["topics"]), "error": error}


def _lags(copies: Mapping[str, int], partitions: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Return the sum of the lags that are known, and how many are not, those of silent nodes included."""
    known = {
        (partition["topic"], partition["partition"]): partition["lag"]
        for partition in partitions
        if partition["lag"] is not None
    }
    return {"lag": sum(known.values()) if known else None, "lag_unknown": max(0, sum(copies.values()) - len(known))}


def _select_copies(described: dict[str, Any], is_selected: Callable[[str], bool]) -> dict[str, Any]:
    """Return the description of a mirror with only some of its copies, and their errors."""
    copies = {topic: count for topic, count in described["copies"].items() if is_selected(topic)}
    partitions = [partition for partition in described["partitions"] if partition["topic"] in copies]
    elsewhere = {partition["error"] for partition in described["partitions"] if partition["topic"] not in copies}
    error = next((partition["error"] for partition in partitions if partition["error"]), "") or (
        "" if described["error"] in elsewhere else described["error"]
    )
    cuts = {topic: offsets for topic, offsets in described["cuts"].items() if is_selected(topic)}
    changed = {"copies": copies, "cuts": cuts, "partitions": partitions, "error": error}
    return {**described, **_lags(copies, partitions), **changed}


def _merge_reports(descriptions: list[dict[str, Any]], silent: list[str]) -> dict[str, Any]:
    newest = max(descriptions, key=lambda description: int(description["version"]))
    reports = [description["report"] for description in descriptions if description["report"] is not None]
    partitions = sorted(
        (partition for report in reports for partition in report["partitions"]),
        key=lambda partition: (partition["topic"], partition["partition"]),
    )
    interrupted = next((text for description in descriptions if (text := description.get("interrupted", ""))), "")
    errors = sorted({report["error"] for report in reports if report["error"]})
    ages = [partition["lag_ms"] for partition in partitions if partition["lag_ms"] is not None]
    states = {report["state"] for report in reports}
    state = next((state for state in ("retrying", "starting", "running") if state in states), "starting")
    if not newest["enabled"]:
        state = "failed over" if newest.get("taken_over") and not newest["topics"] else "paused"
    elif newest["problem"]:
        state = "parked"
    return {
        "mirror": newest["name"],
        "id": newest["mirror_id"],
        "state": state,
        "from": newest["settings"]["from"],
        "source_cluster": next((report["source_cluster"] for report in reports if report["source_cluster"]), ""),
        "error": newest["problem"]
        or interrupted
        or "; ".join(errors)
        or next((partition["error"] for partition in partitions if partition["error"]), ""),
        "interrupted": interrupted,
        "topics": newest["topics"],
        "copies": newest["copies"],
        **_lags(newest["copies"], partitions),
        "lag_s": max(ages) / 1000 if ages else None,
        "bytes": sum(report["bytes"] for report in reports),
        "bytes_per_s": sum(report["bytes_per_s"] for report in reports),
        "groups": max((report["groups"] for report in reports), default=0),
        "queues": max((report["queues"] for report in reports), default=0),
        "is_listed": any(report.get("is_listed") for report in reports),
        "problems": sorted({problem for report in reports for problem in report.get("problems", ())}),
        "notes": sorted({*newest["notes"], *(note for report in reports for note in report["notes"])}) + silent,
        "settings": newest["settings"],
        "overrides": newest["overrides"],
        "created_ms": newest["created_ms"],
        "cuts": newest["cuts"],
        "cutting": newest["cutting"],
        "partitions": partitions,
    }
