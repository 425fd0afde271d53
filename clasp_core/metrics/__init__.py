"""Every published figure as a function of rows: counts, shares, speed-ups, the loss ladder, grades.

Sources are the sections of MEASUREMENT.md named in the docstrings. Unknown or not applicable is `None`, never 0 or 1.
Failed rows never enter a figure. "Decode" is everything after the first token; the prefill pass is not a round.
"""
