"""Limits that keep a page usable and below 20 MB, whatever the runs contain."""

from __future__ import annotations

#: Points of a curve of a highlighted run, and of all curves of the page together. Measured: 250,000 points
#: are 6 MB.
CURVE_POINTS = 500
ALL_POINTS = 250_000
#: Rows of metrics that are read for a page, half of them evaluations. Measured: 200,000 take 2 s.
ALL_ROWS = 200_000
#: Minimum number of training rows and of evaluation rows read per run, for any number of runs.
MIN_ROWS = 10
MIN_EVALUATIONS = 100
CHARTS = 24
#: Maximum number of metrics per run; a run with 150 classes has this many.
METRICS = 400
NAME_LENGTH = 100
#: Number of runs, the best first, that have a colour; files of their evaluation; their experiment file.
HIGHLIGHTED = 8
EVALUATED = 4
DETAILED = 12
#: Training rows that are read of each highlighted run, and as many evaluation rows.
DETAILED_ROWS = 8000
#: Rows of the table of times.
TIME_ROWS = 20
#: Lines of the table of attempts.
ATTEMPT_LINES = 400
CELL_LENGTH = 160
FILE_CHARS = 40_000
#: An evaluation's files: bytes, rows and columns of a table, bytes and number of the pictures of a run.
TABLE_BYTES = 4 << 20
TABLE_ROWS = 200
TABLE_COLUMNS = 20
PICTURE_BYTES = 512 << 10
PICTURES = 6
SAMPLE_CHARS = 4_000
