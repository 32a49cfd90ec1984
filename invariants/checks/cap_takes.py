"""CAP's words for what an operation takes of the free blocks, where its answer was wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvproof.invariants.books import Books
from kvproof.invariants.group_books import GroupBooks
from kvproof.invariants.operations import Admit, Decode, Grow, Operation, Reserve, Resume
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.verdict import counted

_NAMED = 4
"""Blocks of a hit that are named; the others are counted."""


class Takes:
    """Words for it, from the books as before the operation and the hits that CAP predicted."""

    def __init__(
        self, books: Books, growth: Callable[[GroupBooks, RequestModel, int], int]
    ) -> None:
        """``growth``: blocks of a group that growing by so many tokens takes."""
        self._books = books
        self._growth = growth

    def of(self, operation: Operation, outcome: Outcome) -> str:
        """``; it takes 1: 5 tokens need 2, of which block 3 is a hit``, and so on by group."""
        number = outcome.request
        request = None if number is None else self._books.requests.get(number)
        return in_words([self._of(group, operation, request) for group in self._books.groups])

    def hit(self) -> str:
        """``: block 3 is a hit``, and so on by group; nothing without a prediction."""
        return in_words([_hits(hit) for _, hit in self._books.predicted_hits], ":")

    def _of(self, group: GroupBooks, operation: Operation, request: RequestModel | None) -> str:
        if isinstance(operation, Admit):
            return self._enters(group, operation.slots or len(self._books.tags_of(operation)))
        if isinstance(operation, Decode):
            return self._all_grow(group, operation)
        if request is None:
            return ""
        if isinstance(operation, Resume):
            tokens = operation.slots or request.length
            if request.swapped:
                tokens = max(tokens, request.computed)
                rows = _rows(group, tokens)
                return f"it takes {rows}: {_need(tokens, rows)}"
            return self._enters(group, tokens)
        if isinstance(operation, Grow):
            takes = self._growth(group, request, operation.tokens)
            return _more(group, request, request.length + operation.tokens, takes)
        if isinstance(operation, Reserve):
            takes = max(0, _rows(group, operation.slots) - len(request.tables[group.group]))
            return _more(group, request, operation.slots, takes)
        return ""

    def _enters(self, group: GroupBooks, tokens: int) -> str:
        rows, blocks = _rows(group, tokens), self._books.configuration.blocks
        if rows > blocks:
            return f"{_need(tokens, rows)}, and there are {blocks} in all"
        hit = dict(self._books.predicted_hits).get(group.group, [])
        free = [block for block in hit if not group.refs[block]]
        takes = max(0, rows - len(hit)) + len(free)
        found = f", of which {_hits(hit)}" if hit else ", none of which is a hit"
        return f"it takes {takes}: {_need(tokens, rows)}{found}{_but_free(hit, free)}"

    def _all_grow(self, group: GroupBooks, operation: Decode) -> str:
        running = self._books.running
        named = {index % len(running) for index in operation.requests}
        takes = sum([self._growth(group, running[index], 1) for index in named])
        return f"it takes {takes}, for one token more of {counted(len(named), 'request')}"


def in_words(parts: Sequence[str], sign: str = ";") -> str:
    """What there is to say of each group, behind what was said before."""
    if len(parts) == 1:
        return f"{sign} {parts[0]}" if parts[0] else ""
    told = [f"in group {group} {part}" for group, part in enumerate(parts) if part]
    return f"{sign} {'; '.join(told)}" if told else ""


def _rows(group: GroupBooks, tokens: int) -> int:
    return -(-tokens // group.block_size)


def _need(tokens: int, rows: int) -> str:
    return f"{counted(tokens, 'token')} {'needs' if tokens == 1 else 'need'} {rows}"


def _more(group: GroupBooks, request: RequestModel, tokens: int, takes: int) -> str:
    """It is to have slots for so many tokens."""
    rows, held = _rows(group, tokens), len(request.tables[group.group])
    copied = ", one of them to be copied" if takes > max(0, rows - held) else ""
    return f"it takes {takes}: {_need(tokens, rows)}, and it has {held}{copied}"


def _hits(hit: Sequence[int]) -> str:
    return f"{_named(hit)} {'is a hit' if len(hit) == 1 else 'are hits'}"


def _but_free(hit: Sequence[int], free: Sequence[int]) -> str:
    """That free blocks are taken by the hit itself."""
    if not free:
        return ""
    one, all_of_them = len(free) == 1, len(free) == len(hit)
    who = ("it" if one else "they") if all_of_them else _named(free)
    return f", but {who} {'is free itself' if one else 'are free themselves'}"


def _named(blocks: Sequence[int]) -> str:
    """``block 3``, ``blocks 3 and 4``, ``blocks 3, 4, 5, 6 and 12 more``."""
    names = [str(block) for block in blocks[:_NAMED]]
    if len(blocks) > _NAMED:
        names.append(f"{len(blocks) - _NAMED} more")
    if len(names) == 1:
        return f"block {names[0]}"
    return f"blocks {', '.join(names[:-1])} and {names[-1]}"
