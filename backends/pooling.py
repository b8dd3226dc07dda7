"""How an encoder's folder says that a text's token states become its one vector. No torch: both kinds of engine ask.

sentence-transformers writes `1_Pooling/config.json` beside the weights. A folder without one says nothing.
"""

import json
from pathlib import Path
from typing import Final, Literal

POOLING_FILE: Final = Path("1_Pooling") / "config.json"

Pooling = Literal["mean", "cls"]
_MARKS: Final[dict[str, Pooling]] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


class PoolingUnknownError(ValueError):
    """The folder asks for a pooling that is not served, or says nothing that can be understood."""


def pooling_of(folder: Path) -> Pooling | None:
    """The mean over all tokens, or the first token's state; None where the folder does not say.

    Raises PoolingUnknownError: vectors that were pooled otherwise than their encoder was trained to look like vectors.
    """
    file = folder / POOLING_FILE
    try:
        said = json.loads(file.read_bytes())
        chosen = sorted(name for name, on in said.items() if name.startswith("pooling_mode_") and on is True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise PoolingUnknownError(f"{file} can't be read: {error}.") from error
    if len(chosen) != 1 or chosen[0] not in _MARKS:
        raise PoolingUnknownError(f"{file} asks for {' and '.join(chosen) or 'no pooling'}; mean and cls are served.")
    return _MARKS[chosen[0]]


def say_pooling(folder: Path, pooling: Pooling) -> None:
    """Write the folder's file, as sentence-transformers does. It appears whole or not at all."""
    file = folder / POOLING_FILE
    file.parent.mkdir(exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps({mark: name == pooling for mark, name in _MARKS.items()}), encoding="utf-8")
    part.replace(file)
