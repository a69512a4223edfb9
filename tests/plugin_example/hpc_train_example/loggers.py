"""``table``: the validation rows as a table."""

import csv

from hpc_train.plugins import LoggerContext, Row

COLUMNS = ("attempt", "step", "loss", "accuracy")


class CsvLogger:
    def __init__(self, context: LoggerContext) -> None:
        self._file = (context.paths.folder / context.args.get("file", "metrics.csv")).open("a", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore")
        if self._file.tell() == 0:
            self._writer.writeheader()

    def log(self, row: Row) -> None:
        if row["split"] == "val":
            self._writer.writerow(row)

    def close(self, state: str) -> None:
        self._file.close()
