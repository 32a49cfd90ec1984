"""KEY: equal keys mean equal prefixes, and equal prefixes get equal keys.

Verifies: that no key stands for two different (salt, adapter, media, tokens) prefixes and no
prefix has two keys, among all that a run publishes (the books remember the last 100,000 prefixes
beyond the findable ones); that a hit is served only content equal to the asking request's own
prefix, and where groups share a pool, of the group that asks.

Does not verify: strength of the digest against an adversary; equality of keys across processes
and machines (the replay digest covers it, since keys are part of it).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.events import BlocksPublished, BlocksReused, Event, TransferStarted
from kvproof.invariants.group_books import PooledBooks
from kvproof.invariants.property import Check, Claim, EventHandler
from kvproof.invariants.tags import tag_at_end

_REMEMBERED = 100_000


class Key(Check):
    """The key function is injective and stable."""

    claims = (
        Claim(
            "Two prefixes that differ in tokens, salt, adapter or media never share a key.",
            "bugs B45, B47, B48, B50, B51; survey R02, R09, R10, E17",
        ),
        Claim("The same prefix always gets the same key.", "bugs B52, B53"),
        Claim(
            "A hit serves a request only KV of its own prefix.",
            "bugs B45, B47, B50; survey R10",
        ),
    )
    positive_control = "adapter-not-in-key"

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        # Per group: what was published, beyond what is findable now.
        self._tag_of_key: list[dict[bytes, int]] = [{} for _ in self.groups]
        self._key_of_tag: list[dict[int, bytes]] = [{} for _ in self.groups]

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        handlers: dict[type[Event], EventHandler] = {
            BlocksPublished: self._published,
            BlocksReused: self._reused,
        }
        if self.books.tiers is not None and not self.semantics.copies_hold:
            handlers[TransferStarted] = self._stored
        return handlers

    def _stored(self, event: TransferStarted) -> None:
        """What nobody could find before gets its key when it is stored."""
        tiers = self.books.tiers
        assert tiers is not None
        for block, key in zip(event.sources, event.keys, strict=False):
            content = tiers.left.get(block) if key not in tiers.content else None
            if event.kind != "store" or content is None:
                continue
            self.checked += 1
            tag = tag_at_end(content)
            why = self._wrong(event.group, key, tag)
            if why:
                self.fail(
                    f"block {block} is stored by transfer {event.transfer} under key "
                    f"{key.hex()[:12]}…, {why}",
                    group=event.group,
                    block=block,
                    transfer=event.transfer,
                )
                return

    def _published(self, event: BlocksPublished) -> None:
        request = self.books.known.get(event.request)
        size, row = self.groups[event.group].block_size, event.row
        end = event.tokens or (row + len(event.blocks)) * size
        if request is None or end > request.length:
            return  # LIFE, VALID
        self.checked += 1
        tags = self.books.published_tags(event, request)
        # One state has one tag: of several blocks, VALID tells.
        for block, key, tag in zip(event.blocks, event.keys, tags, strict=False):
            why = self._wrong(event.group, key, tag)
            if why:
                self.fail(
                    f"block {block} of request {event.request} was published under key "
                    f"{key.hex()[:12]}…, {why}",
                    group=event.group,
                    block=block,
                    request=event.request,
                )
                return
        if len(self._tag_of_key[event.group]) > _REMEMBERED:
            self._forget(event.group)

    def _wrong(self, group: int, key: bytes, tag: int) -> str | None:
        """Why this prefix has another key, or the key another prefix; remembers both."""
        if self._tag_of_key[group].setdefault(key, tag) != tag:
            return "which stands for another prefix"
        known = self._key_of_tag[group].setdefault(tag, key)
        return None if known == key else f"but the same prefix had key {known.hex()[:12]}… before"

    def _forget(self, group: int) -> None:
        """Remember only what is findable, so that long runs stay flat in memory."""
        books = self.groups[group]
        self._key_of_tag[group] = dict(books.key_of_tag)
        self._tag_of_key[group] = {key: tag for tag, key in books.key_of_tag.items()}

    def _reused(self, event: BlocksReused) -> None:
        request = self.books.known.get(event.request)
        if request is None:
            return
        self.checked += 1
        group = self.groups[event.group]
        size = group.block_size
        tags = request.tags[(event.row + 1) * size - 1 :: size]
        if event.group in self.semantics.states:
            tags = request.tags[request.computed - 1 : request.computed]
        if isinstance(group, PooledBooks):
            self._of_the_group(event, group)
        for block, tag in zip(event.blocks, tags, strict=False):
            if block not in group.key_of:
                return  # VALID
            if group.tag_of[block] != tag:
                self.fail(
                    f"request {event.request} got a prefix hit on block {block}, which holds "
                    "another prefix",
                    group=event.group,
                    block=block,
                    request=event.request,
                )
                return

    def _of_the_group(self, event: BlocksReused, group: PooledBooks) -> None:
        """Where groups share a pool, equal tokens of another group are other layers' KV."""
        for block in event.blocks:
            other = group.group_of.get(block, event.group)
            if other != event.group:
                self.fail(
                    f"request {event.request} got a prefix hit in group {event.group} on block "
                    f"{block}, which is findable in group {other}",
                    group=event.group,
                    block=block,
                    request=event.request,
                )
                return
