"""Token ids to compressed ids for the engram hash, and the tokenizer itself.

Ids whose text differs only in case, accents or white space share one compressed id. The map comes from
`engram_token_map.json` when the checkpoint has one, else it is rebuilt from `tokenizer.json`, which needs the extra
`text`. Knows nothing of the hash.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds41rt.checkpoint.json_file import load_json
from ds41rt.config import ModelConfig
from ds41rt.errors import CheckpointError, UnsupportedError

MAP_FILE = "engram_token_map.json"
TOKENIZER_FILE = "tokenizer.json"
# Stands for a lone space while both ends are stripped.
_SPACE_MARK = "\ue000"


class _MapFile(BaseModel):
    model_config = ConfigDict(strict=True)

    size: int
    map: list[Annotated[int, Field(ge=0)]]


def load_token_map(directory: str | Path, cfg: ModelConfig) -> NDArray[np.int64]:
    """Compressed id of every token, int64[vocab].

    Raises `CheckpointError` when neither source is there or the result does not fit `cfg`, `UnsupportedError` when it
    has to be rebuilt and the tokenizers package is not installed.
    """
    directory = Path(directory)
    path = directory / MAP_FILE
    if path.exists():
        ids = _read_map(path, cfg)
    elif (directory / TOKENIZER_FILE).exists():
        path = directory / TOKENIZER_FILE
        ids = rebuild_token_map(load_tokenizer(directory))
    else:
        raise CheckpointError(f"{directory}: neither {MAP_FILE} nor {TOKENIZER_FILE} is present; one of them is needed")
    if len(ids) != cfg.vocab:
        raise CheckpointError(f"{path}: covers {len(ids)} tokens, the vocabulary has {cfg.vocab}")
    if set(ids) != set(range(cfg.engram_compressed_vocab)):
        raise CheckpointError(
            f"{path}: has {len(set(ids))} compressed ids up to {max(ids)}; "
            f"engram_compressed_vocab_size is {cfg.engram_compressed_vocab}"
        )
    return np.array(ids, np.int64)


def load_tokenizer(directory: str | Path) -> Any:
    """The checkpoint's `tokenizers.Tokenizer`; `UnsupportedError` names the extra when the package is missing."""
    path = Path(directory) / TOKENIZER_FILE
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise UnsupportedError(f"{path} needs the tokenizers package; install the extra: ds41rt[text]") from e
    if not path.is_file():
        raise CheckpointError(f"{path}: is missing")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the package raises nothing narrower
        raise CheckpointError(f"{path}: not a usable tokenizer: {e}") from e


def rebuild_token_map(tokenizer: Any) -> list[int]:
    """Compressed ids from a tokenizer, numbered in first-seen order over ascending token ids."""
    from tokenizers import Regex, normalizers

    fold = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE_MARK),
            normalizers.Strip(),
            normalizers.Replace(_SPACE_MARK, " "),
        ]
    )
    first_seen: dict[str, int] = {}
    ids = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        # A fragment of a character has no text of its own: only the token's spelling tells it apart.
        key = tokenizer.id_to_token(token) if "\ufffd" in text else fold.normalize_str(text) or text
        ids.append(first_seen.setdefault(key, len(first_seen)))
    return ids


def _read_map(path: Path, cfg: ModelConfig) -> list[int]:
    try:
        file = _MapFile.model_validate(load_json(path))
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise CheckpointError(f"{path}: {'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}") from e
    if file.size != cfg.engram_compressed_vocab:
        raise CheckpointError(
            f"{path}: size is {file.size}, engram_compressed_vocab_size is {cfg.engram_compressed_vocab}"
        )
    return file.map
