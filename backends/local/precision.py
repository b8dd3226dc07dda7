"""The words for number formats, as the command line, the settings and the reports spell them. No torch here.

`weights.py` and `kv/pool.py` say what each of them does to a tensor.
"""

from enum import StrEnum


class KVPrecision(StrEnum):
    AUTO = "auto"
    """The model's own type."""
    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"


class WeightPrecision(StrEnum):
    BF16 = "bf16"
    """As the checkpoint has them."""
    FP8 = "fp8"
    """e4m3, a scale per output channel; computed with in the model's type."""
    INT4 = "int4"
    """Four bits and a scale for 64 weights of a row; computed with in bfloat16."""
