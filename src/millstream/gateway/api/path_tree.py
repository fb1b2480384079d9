"""Finds the route of a request: by the segments of its path as they were sent, so that a name may hold a slash."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Generic, TypeVar
from urllib.parse import unquote_to_bytes

from millstream.gateway.api.problem import Refused, invalid
from millstream.gateway.api.route import PREFIX, Route

S = TypeVar("S")


class PathTree(Generic[S]):
    """What serves each route, by the routes' paths: literal segments first, then names."""

    def __init__(self) -> None:
        self._root: _Node[S] = _Node()

    def add(self, route: Route[Any, Any], served: S) -> None:
        """Have something found at the path and method of a route."""
        node = self._root
        for segment in route.path.removeprefix("/").split("/"):
            node = node.below(segment)
        node.routes[route.method] = served

    def find(self, method: str, raw_path: bytes) -> tuple[S, dict[str, str]]:
        """What serves a method and a path, and the names in the path; raises `Refused` if nothing does."""
        node = self._root
        names: dict[str, str] = {}
        for segment in raw_path.split(b"/")[1:]:
            known = node.literal.get(segment)
            if known is None:
                known = node.named
                if known is None or not segment:
                    raise _nothing(raw_path)
                names[node.name] = _text(segment)
            node = known
        route = node.routes.get(method)
        if route is None:
            if not node.routes:
                raise _nothing(raw_path)
            raise Refused(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"{method} is not understood at {_shown(raw_path)}",
                headers={"allow": ", ".join(sorted(node.routes))},
            )
        return route, names


class _Node(Generic[S]):
    __slots__ = ("literal", "name", "named", "routes")

    def __init__(self) -> None:
        self.literal: dict[bytes, _Node[S]] = {}
        self.named: _Node[S] | None = None
        self.name = ""
        self.routes: dict[str, S] = {}

    def below(self, segment: str) -> _Node[S]:
        if not segment.startswith("{"):
            return self.literal.setdefault(segment.encode(), _Node())
        if self.named is None:
            self.named = _Node()
            self.name = segment[1:-1]
        return self.named


def _text(segment: bytes) -> str:
    try:
        return (unquote_to_bytes(segment) if b"%" in segment else segment).decode()
    except UnicodeDecodeError:
        raise invalid("a name in the path is not UTF-8") from None


def _nothing(raw_path: bytes) -> Refused:
    return Refused(HTTPStatus.NOT_FOUND, f"nothing is served at {_shown(raw_path)}; GET /openapi.json lists what is")


def _shown(raw_path: bytes) -> str:
    return PREFIX + raw_path.decode("ascii", "backslashreplace")
