"""Writes rows of text as Parquet with typed columns. The command line calls; DuckDB comes with the extra `exports`."""

import csv
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from billing.errors import ExportUnavailable

_NULL = r"\N"


def write_parquet(
    rows: Iterable[Mapping[str, object]], columns: Sequence[str], types: Mapping[str, str], target: Path
) -> None:
    """types: SQL types of the columns that are no text, such as BIGINT or DECIMAL(38, 9). None is null.

    Goes through a temporary file, so that a month of requests needs no memory. Raises ExportUnavailable without DuckDB,
    OSError if the disk is full.
    """
    try:
        import duckdb  # noqa: PLC0415 - its 20 MB come with the extra alone
    except ImportError as error:
        raise ExportUnavailable("Parquet needs DuckDB: pip install 'pagegate[exports]'.") from error
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder).joinpath("rows.csv")
        with text.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            for row in rows:
                writer.writerow([_NULL if row[name] is None else row[name] for name in columns])
        typed = {name: types.get(name, "VARCHAR") for name in columns}
        with duckdb.connect() as connection:
            relation = connection.read_csv(
                str(text), header=False, columns=typed, quotechar='"', escapechar='"', sep=",", na_values=_NULL
            )
            relation.write_parquet(str(target), compression="zstd")
