"""How a part of a node has work done beside it that must not end unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Supervise = Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts work under a name; a failure of it is one of the whole node."""
