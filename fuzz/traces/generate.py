"""Writes the small example traces that come with kvproof, one in each format.

``python -m kvproof.fuzz.traces.generate DIR`` writes the files of ``fuzz/traces/data`` again,
byte for byte.  All of it is drawn from a seeded generator; nothing comes from a real trace.

Lengths and gaps are such that a pool of ``EXAMPLE_BLOCKS`` blocks of ``EXAMPLE_BLOCK_SIZE``
tokens is short of blocks: there are prefix hits, evictions and preemptions within seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

from kvproof.fuzz.traces.formats import MOONCAKE_BLOCK_TOKENS

EXAMPLE_BLOCKS = 512
EXAMPLE_BLOCK_SIZE = 16

MOONCAKE_NAME = "example-mooncake.jsonl"
AZURE_NAME = "example-azure.csv"

_SEED = 20_260
_CONVERSATIONS = 24
_TURNS = 5
_AZURE_REQUESTS = 120
_AZURE_START = datetime(2026, 1, 1)
_SHARED_SYSTEM_PROMPT = 0
"""Hash id of the block that every conversation starts with."""


def _draw(rng: Random, low: int, high: int) -> int:
    """From ``low`` to ``high``, small values more often than large ones.

    Only ``Random.random`` gives the same numbers in every version of Python.
    """
    return low + int((high - low + 1) * rng.random() ** 2)


def _conversation(rng: Random, ids: Iterator[int]) -> Iterator[dict[str, Any]]:
    """The turns of a chat: each prompt is the one before it, its answer, and a new question.

    Full blocks keep their ids from turn to turn.  The partial last one does not: its content, and
    so its hash, changes when it is filled up.
    """
    time_ms = _draw(rng, 0, 8_000)
    full_blocks = [_SHARED_SYSTEM_PROMPT]
    input_length = MOONCAKE_BLOCK_TOKENS
    for _ in range(_TURNS):
        input_length += _draw(rng, 40, 900)
        output_length = _draw(rng, 8, 300)
        while len(full_blocks) < input_length // MOONCAKE_BLOCK_TOKENS:
            full_blocks.append(next(ids))
        partial_block = [next(ids)] if input_length % MOONCAKE_BLOCK_TOKENS else []
        yield {
            "timestamp": time_ms,
            "input_length": input_length,
            "output_length": output_length,
            "hash_ids": full_blocks + partial_block,
        }
        input_length += output_length
        time_ms += 500 + _draw(rng, 0, 6_000)


def example_mooncake() -> bytes:
    """Chats of several turns over one system prompt, as Mooncake JSON lines."""
    rng = Random(_SEED)
    ids = iter(range(1, 1 << 20))
    requests = [turn for _ in range(_CONVERSATIONS) for turn in _conversation(rng, ids)]
    requests.sort(key=lambda request: request["timestamp"])
    return "".join(json.dumps(request) + "\n" for request in requests).encode()


def example_azure() -> bytes:
    """Unrelated requests of mixed lengths, as Azure CSV."""
    rng = Random(_SEED)
    time = _AZURE_START
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(_AZURE_REQUESTS):
        context_tokens, generated_tokens = _draw(rng, 16, 3_000), _draw(rng, 4, 300)
        # Seven digits of a second, like the published files.
        lines.append(f"{time:%Y-%m-%d %H:%M:%S.%f}0,{context_tokens},{generated_tokens}")
        time += timedelta(microseconds=_draw(rng, 1_000, 400_000))
    return "".join(line + "\n" for line in lines).encode()


def write_examples(directory: Path) -> list[Path]:
    """Write both example files into ``directory``, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, content in ((MOONCAKE_NAME, example_mooncake()), (AZURE_NAME, example_azure())):
        path = directory / name
        path.write_bytes(content)
        paths.append(path)
    return paths


def main(arguments: list[str] | None = None) -> None:
    """The command line of the generator."""
    parser = argparse.ArgumentParser(
        prog="python -m kvproof.fuzz.traces.generate",
        description="Write a small generated request trace in each format.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the files go")
    for path in write_examples(parser.parse_args(arguments).directory):
        print(path)


if __name__ == "__main__":
    main()
