"""Limits that keep a page usable and below 20 MB, whatever the runs contain."""

from __future__ import annotations

#: Spikes marked per highlighted run, the newest ones.
SPIKES = 50
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
#: Of a label in legends, its experiment and each of its values.
LABEL_PART = 24
#: Columns of the table of runs that are shown at first; a menu has the others.
COLUMNS = 8
#: On the screen of a phone.
NARROW_COLUMNS = 3
#: Number of runs, the best first, that have a color; files of their evaluation; their experiment file.
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
#: A column of values up to this long is not broken into lines.
SHORT_CELL = 14
FILE_CHARS = 40_000
#: An evaluation's files: bytes, rows and columns of a table, bytes of a picture, number of the pictures of a
#: run and of the samples of a sheet. A sheet of 8 photos has 1 MB.
TABLE_BYTES = 4 << 20
TABLE_ROWS = 200
TABLE_COLUMNS = 20
PICTURE_BYTES = 2 << 20
PICTURES = 6
SAMPLES = 64
SAMPLE_CHARS = 4_000
