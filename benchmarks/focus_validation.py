"""A FOCUS export of every kind of row before the FinOps Foundation's own validator: prints what it finds wrong.

    python3.12 -m venv V && V/bin/pip install focus-validator 'pyarrow<22'
    python -m benchmarks.focus_validation V/bin/focus-validator

focus-validator 2 needs Python 3.12, so it has an environment of its own. It brings the rules of FOCUS 1.2 with it.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from billing.exports.focus import COLUMNS, DECIMALS
from billing.exports.parquet import write_parquet
from tests.billing.exports.every_kind import rows_of_every_kind

_TIMEOUT_S = 300
# What is true of us, of all that providers may support.
_CRITERIA = (
    "ACCOUNT_NAMING_SUPPORTED,NEGOTIATED_PRICING_SUPPORTED,PUBLIC_PRICE_LIST_SUPPORTED,"
    "RESOURCE_TYPE_ASSIGNMENT_SUPPORTED,TAGGING_SUPPORTED,UNIT_PRICING_SUPPORTED,USAGE_MEASUREMENT_SUPPORTED"
)
# "Must be null if there is no invoice" and "must not be null if there is one" come without their conditions, so that
# whatever is told of an invoice breaks one of them.
_CONTRADICTORY = "InvoiceId-C-004-C"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("validator", type=Path, help="the program focus-validator, in its environment")
    validator = parser.parse_args().validator.absolute()
    rules = next((validator.parents[1] / "lib").glob("*/site-packages"))  # it looks for its tables from there
    with tempfile.TemporaryDirectory() as folder:
        export = Path(folder, "focus.parquet")  # of CSV it guesses types, and takes an invoice's name for a number
        types = {name: f"DECIMAL(38, {decimals})" for name, decimals in DECIMALS.items()}
        write_parquet(rows_of_every_kind(Path(folder)), COLUMNS, types, export)
        command = [str(validator), "--data-file", str(export), "--validate-version", "1.2", "--block-download"]
        command += ["--applicability-criteria", _CRITERIA]
        told = subprocess.run(
            command, cwd=rules, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        ).stdout
    wrong = [line for line in told.splitlines() if ": FAIL" in line and _CONTRADICTORY not in line]
    print(next((line for line in told.splitlines() if line.startswith("Total:")), told))
    print("\n".join(wrong))
    sys.exit(1 if wrong or "Total:" not in told else 0)


if __name__ == "__main__":
    main()
