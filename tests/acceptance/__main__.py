"""`python -m tests.acceptance [POINT ...]`: run the points, print one line each, fail if one falls short."""

from __future__ import annotations

import sys
import time

from tests.acceptance import baselines, core, reports, speed

POINTS = {**core.POINTS, **baselines.POINTS, **speed.POINTS, **reports.POINTS}


def main(wanted: list[str]) -> int:
    """The number of points that do not hold."""
    unknown = [name for name in wanted if name not in POINTS]
    if unknown:
        sys.exit(f"error: unknown point {unknown[0]!r}; known are {', '.join(POINTS)}")
    num_short = 0
    for name in wanted or POINTS:
        started = time.monotonic()
        point = POINTS[name]()
        num_short += not point.holds
        verdict = "holds" if point.holds else "FALLS SHORT"
        print(f"{verdict:11} {name}: {point.figure} ({time.monotonic() - started:.0f} s)", flush=True)
    return num_short


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
