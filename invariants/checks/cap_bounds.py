"""CAP's part about subjects that promise no exact admission: bounds, in place of predictions.

Such a subject may hit less than is findable and, where it keeps room, refuse what would fit.  What
it does must have had room all the same, and what it claims to find must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvproof.invariants.checks.cap_answers import Answers
from kvproof.invariants.checks.cap_takes import in_words
from kvproof.invariants.group_books import GroupBooks
from kvproof.invariants.operations import (
    Admit,
    Decode,
    Grow,
    Operation,
    Reserve,
    Resume,
    kind_of,
)
from kvproof.invariants.outcomes import (
    HIT_PENDING,
    LARGER_THAN_POOL,
    NO_FREE_BLOCKS,
    TOO_MANY_REQUESTS,
    Outcome,
)
from kvproof.invariants.property import OperationHandler
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.tags import Tags


class Bounds:
    """Judges what was done or refused; it reports through that check."""

    def __init__(self, check: Answers, short: Callable[[Sequence[int]], bool]) -> None:
        """``short``: whether groups lack so many free blocks."""
        self._check = check
        self._books = check.books
        self._groups = check.groups
        self._short = short
        self._states = frozenset(check.semantics.states)
        self._windows = [check.books.window(group.group) for group in check.groups]

    def handlers(self) -> Mapping[type[Operation], OperationHandler]:
        return {
            Admit: self._admit,
            Resume: self._resume,
            Grow: self._grow,
            Decode: self._decode,
            Reserve: self._reserve,
        }

    # -- with the books as before the operation --------------------------------------------------

    def _admit(self, operation: Admit, outcome: Outcome) -> None:
        tags = self._books.tags_of(operation)
        tokens = len(tags)
        self._enters(operation, outcome, tags, operation.slots or tokens, (tokens, tokens))

    def _resume(self, operation: Resume, outcome: Outcome) -> None:
        request = self._known(outcome.request)
        if request is not None and request.swapped:
            rows = self._rows(max(operation.slots or request.length, request.computed))
            if self._may_run(operation, outcome):
                self._judge(operation, outcome, self._beside(request.tags, 0, rows), rows)
        elif request is not None:
            # It may have one token more, which is told when it has a slot.
            lengths = request.settled, request.length + 1
            tokens = operation.slots or request.length
            self._enters(operation, outcome, request.tags, tokens, lengths)

    def _enters(
        self,
        operation: Admit | Resume,
        outcome: Outcome,
        tags: Tags[int],
        tokens: int,
        lengths: tuple[int, int],
    ) -> None:
        """It wants slots for so many tokens; ``lengths``: it has so many at least, and at most."""
        if not self._may_run(operation, outcome):
            return
        most, hit = self._rows(tokens), 0
        for place in self._states:
            most[place] += 2  # a copy of the state that it hits, and one that it leaves
        if outcome.status == "done":
            hit = outcome.cached_tokens
            least_length, length = lengths
            why = self._no_hit(tags, hit, length) if hit else None
            if why is None and not self._check.semantics.shorter_hits:
                why = self._longer_hit(tags, hit, least_length)
            if why is not None:
                self._check.fail(
                    f"{kind_of(operation)}: a hit of {hit} tokens is claimed, but {why}",
                    request=outcome.request,
                )
                return
        least = self._beside(tags, hit, most)
        self._judge(operation, outcome, least, most)

    def _may_run(self, operation: Operation, outcome: Outcome) -> bool:
        """Whether it is not refused as one too many while fewer run.  (That no more run than may is
        for BUDGET to say.)"""
        full = len(self._books.running) >= self._books.configuration.requests
        if outcome.reason == TOO_MANY_REQUESTS and not full:
            self._check.wrong_answer(operation, outcome, None)
            return False
        return True

    def _no_hit(self, tags: Tags[int], cached: int, below: int) -> str | None:
        """Why so many tokens cannot be hit: they must be findable, in whole blocks, and leave one
        to compute."""
        if cached >= below:
            return f"of {below} tokens the last one is to be computed"
        if cached % self._books.hit_tokens:
            return f"blocks have {self._books.hit_tokens}"
        for group in self._groups:
            size = group.block_size
            if group.group in self._states:
                if tags[cached - 1] not in group.key_of_tag:
                    return "the state there is not findable"
                continue
            for row in range(self._books.first_row(group.group, cached), cached // size):
                if tags[(row + 1) * size - 1] not in group.key_of_tag:
                    return f"its row {row} is not findable"
        return None

    def _longer_hit(self, tags: Tags[int], hit: int, below: int) -> str | None:
        """That more tokens can be hit, if they can: fewer than ``below``."""
        unit = self._books.hit_tokens
        if self._books.configuration.prefix_caching:
            for longer in range((below - 1) // unit * unit, hit, -unit):
                if self._no_hit(tags, longer, below) is None:
                    return f"{longer} are findable"
        return None

    def _beside(self, tags: Tags[int], cached: int, rows: Sequence[int]) -> list[int]:
        """Free blocks that each group takes at least: beside a hit, and for it."""
        takes = [0] * len(rows)
        for place, group in enumerate(self._groups):
            if place in self._states:
                takes[place] = 1 + self._revived(group, tags[max(0, cached - 1) : cached])
                continue
            if self._windows[place]:
                continue  # what is behind it needs none
            size = group.block_size
            takes[place] = max(0, rows[place] - cached // size)
            takes[place] += self._revived(group, tags[size - 1 : cached : size])
        return takes

    def _revived(self, group: GroupBooks, tags: Tags[int]) -> int:
        """Free blocks that a hit takes at least, on what has these tags."""
        held, found = group.refs, [group.blocks_of[group.key_of_tag[tag]] for tag in tags]
        return sum([not any(held[block] for block in equal) for equal in found])

    def _grow(self, operation: Grow, outcome: Outcome) -> None:
        request = self._known(outcome.request)
        if request is not None:
            self._grows(operation, outcome, [(request, request.length + operation.tokens)])

    def _reserve(self, operation: Reserve, outcome: Outcome) -> None:
        request = self._known(outcome.request)
        if request is not None:
            self._grows(operation, outcome, [(request, operation.slots)])

    def _decode(self, operation: Decode, outcome: Outcome) -> None:
        running = self._books.running
        named = {index % len(running) for index in operation.requests} if running else ()
        wanted = [(running[index], running[index].length + 1) for index in named]
        self._grows(operation, outcome, wanted)

    def _grows(
        self, operation: Operation, outcome: Outcome, wanted: Sequence[tuple[RequestModel, int]]
    ) -> None:
        """Each of these requests is to have slots for so many tokens."""
        least, most = [0] * len(self._groups), [0] * len(self._groups)
        for request, tokens in wanted:
            for place, rows in enumerate(self._rows(tokens)):
                table, refs = request.tables[place], self._groups[place].refs
                more = max(0, rows - len(table))
                # Blocks that are behind a window may come back first.
                least[place] += -len(table) if self._windows[place] else more
                # The block that it writes next may have to be copied.
                row = request.length // self._groups[place].block_size
                copied = row < len(table) and refs[table[row]] > 1
                most[place] += more + (copied or place in self._states)
        if outcome.status == "refused" and any(self._never_fits(tokens) for _, tokens in wanted):
            return
        self._judge(operation, outcome, least, most)

    # -- room ------------------------------------------------------------------------------------

    def _judge(
        self, operation: Operation, outcome: Outcome, least: Sequence[int], most: Sequence[int]
    ) -> None:
        """What is done takes so many free blocks of each group at least, and at most."""
        if outcome.status == "done":
            if self._short(least):
                takes = in_words([f"it takes {max(0, rows)} at least" for rows in least])
                self._check.wrong_answer(operation, outcome, NO_FREE_BLOCKS, takes=takes)
        elif not self._check.semantics.keeps_room and (
            (outcome.reason == NO_FREE_BLOCKS and not self._short(most))
            or (outcome.reason == LARGER_THAN_POOL and not self._larger_than_pool(most))
            or (outcome.reason == HIT_PENDING and not self._anything_comes())
        ):
            takes = in_words([f"it takes {rows} at most" for rows in most])
            self._check.wrong_answer(operation, outcome, None, takes=takes)

    def _anything_comes(self) -> bool:
        """Whether a hit may be pending: a lower tier has what it needs, or a state is findable that
        no step was launched for."""
        if self._books.tiers is not None:
            return True
        owed = [owed for place in self._states for owed in self._groups[place].owed.values()]
        return not all(map(self._books.due, owed))

    def _rows(self, tokens: int) -> list[int]:
        """Blocks of each group for so many tokens."""
        return [-(-tokens // group.block_size) for group in self._groups]

    def _larger_than_pool(self, rows: Sequence[int]) -> bool:
        together = sum if self._check.semantics.shared_pool else max
        return together(rows) > self._books.configuration.blocks

    def _never_fits(self, tokens: int) -> bool:
        return self._larger_than_pool(self._rows(tokens))

    def _known(self, number: int | None) -> RequestModel | None:
        return None if number is None else self._books.requests.get(number)

    # -- with the books as after it --------------------------------------------------------------

    def grown(self, outcome: Outcome) -> None:
        """What is behind a window is given back when its request grows, at the latest."""
        if self._check.semantics.windows_lag:
            return
        for number in (outcome.request, *outcome.children):
            request = self._known(number)
            if request is None:
                continue
            for group, window in zip(self._groups, self._windows, strict=True):
                behind = self._books.first_row(group.group, request.computed)
                table = request.tables[group.group][:behind]
                kept = [b for b in table if b not in self._check.semantics.reserved]
                if kept:
                    self._check.fail(
                        f"request {request.id} grew, and still holds blocks {kept}, which are "
                        f"behind its window of {window} tokens",
                        group=group.group,
                        block=kept[0],
                        request=request.id,
                    )
                    return
