"""The throttle time that answers carry: clients are held back by not reading from them, so it is always zero."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from kio.static.primitive import i32Timedelta

NO_THROTTLE: Final = i32Timedelta.parse(timedelta(0))
