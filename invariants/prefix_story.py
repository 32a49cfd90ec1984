"""How two prefixes differ that a subject takes for the same, told from the recorded run.

KEY knows prefixes by digests alone.  What tells them apart stands in the operations: salt, adapter,
media items, and tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import zip_longest

from msgspec import Struct

from kvproof.invariants.events import BlocksEvicted, BlocksPublished, BlocksReused, Event, KeyMoved
from kvproof.invariants.operations import Admit, Decode, Fork, Grow, Media, Operation
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.prompts import clip_media, prompt_tokens, sampled_token, sampled_tokens
from kvproof.invariants.verdict import Violation, counted


class _Request(Struct):
    """All that a key must tell of it."""

    salt: int
    adapter: int
    media: tuple[Media, ...]
    tokens: list[int]


class _Prefix(Struct, frozen=True):
    """The first ``end`` tokens of a request, of which a block has those from ``start`` on."""

    number: int
    request: _Request
    start: int
    end: int

    @property
    def tokens(self) -> Sequence[int]:
        return self.request.tokens[: self.end]

    @property
    def media(self) -> Sequence[Media]:
        return [item for item in self.request.media if item.start < self.end]

    def __str__(self) -> str:
        return f"the first {counted(self.end, 'token')} of r{self.number}"


class Prefixes:
    """Follows a run up to the violation of KEY that is to be told of."""

    def __init__(self, violation: Violation, block_size: int) -> None:
        self._violation = violation
        self._size = violation.block_size or block_size
        self._requests: dict[int, _Request] = {}
        self._in_block: dict[int, _Prefix | None] = {}
        """What was made findable in a block last …"""
        self._of_key: dict[bytes, _Prefix | None] = {}
        """… and under a key first."""

    def do(self, operation: Operation, outcome: Outcome) -> None:
        """What a done operation makes of its requests' tokens."""
        requests, number = self._requests, outcome.request
        if isinstance(operation, Admit) and number is not None:
            tokens = prompt_tokens(operation.prompt, operation.media).tolist()
            media = clip_media(operation.media, len(tokens))
            requests[number] = _Request(operation.salt, operation.adapter, media, tokens)
        elif isinstance(operation, Grow) and number in requests:
            tokens = requests[number].tokens
            tokens += sampled_tokens(operation.choice, len(tokens), operation.tokens)
        elif isinstance(operation, Decode):
            for child in requests.keys() & set(outcome.children):
                tokens = requests[child].tokens
                tokens.append(sampled_token(operation.choice, len(tokens)))
        elif isinstance(operation, Fork) and number in requests:
            requests.update({child: deepcopy(requests[number]) for child in outcome.children})

    def tell(self, event: Event, op: int) -> str | None:
        """In what the two prefixes differ, if the event is the one that took them for the same."""
        about = self._violation
        if about.block is None or getattr(event, "group", None) != about.group:
            return None
        blamed = (op, getattr(event, "request", None)) == (about.op, about.request)
        if isinstance(event, BlocksPublished):
            for block, key, prefix in self._published(event):
                stood = self._of_key.setdefault(key, prefix)
                self._in_block[block] = prefix
                if blamed and block == about.block:
                    return _difference(stood, prefix)
        elif isinstance(event, BlocksReused):
            if blamed and about.block in event.blocks:
                row = event.row + list(event.blocks).index(about.block)
                asked = self._prefix(event.request, row, (row + 1) * self._size)
                return _difference(self._in_block.get(about.block), asked)
        elif isinstance(event, BlocksEvicted):
            for block in event.blocks:
                self._in_block.pop(block, None)
        elif isinstance(event, KeyMoved):
            self._in_block[event.target] = self._in_block.pop(event.source, None)
        return None

    def _published(self, event: BlocksPublished) -> Iterator[tuple[int, bytes, _Prefix | None]]:
        for index, (block, key) in enumerate(zip(event.blocks, event.keys, strict=False)):
            row = event.row + index
            end = event.tokens or (row + 1) * self._size
            yield block, key, self._prefix(event.request, row, end)

    def _prefix(self, number: int, row: int, end: int) -> _Prefix | None:
        request = self._requests.get(number)
        return None if request is None else _Prefix(number, request, row * self._size, end)


def _difference(stood: _Prefix | None, asked: _Prefix | None) -> str | None:
    if stood is None or asked is None:
        return None
    differences = list(_differences(stood, asked))
    if not differences:
        return None
    return f"{stood} and {asked} were taken for the same, but differ in {', in '.join(differences)}"


def _differences(stood: _Prefix, asked: _Prefix) -> Iterator[str]:
    for name in ("salt", "adapter"):
        one, other = getattr(stood.request, name), getattr(asked.request, name)
        if one != other:
            yield f"{name} ({one} and {other})"
    for item, another in zip_longest(stood.media, asked.media):
        if item != another:
            yield f"media ({_shown(item)}, and {_shown(another)})"
            break
    for position, (one, other) in enumerate(zip(stood.tokens, asked.tokens, strict=False)):
        if one != other:
            where = "in the block itself" if position >= asked.start else "before the block"
            yield f"token {position} ({one} and {other}), {where}"
            return
    if stood.end != asked.end:
        yield "length"


def _shown(item: Media | None) -> str:
    if item is None:
        return "none"
    return f"item {item.item} at {counted(item.length, 'token')} from {item.start} on"
