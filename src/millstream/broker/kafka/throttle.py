"""The throttle time of answers that no quota limits: all but those of Produce and Fetch."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from kio.static.primitive import i32Timedelta

NO_THROTTLE: Final = i32Timedelta.parse(timedelta(0))
