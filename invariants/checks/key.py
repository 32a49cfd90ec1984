"""KEY: equal keys mean equal prefixes, and equal prefixes get equal keys.

Verifies: that no key stands for two different (salt, adapter, media, tokens) prefixes and no
prefix has two keys, among all that a run publishes (the books remember the last 100,000 prefixes
beyond the findable ones); that a hit is served only content equal to the asking request's own
prefix.

Does not verify: strength of the digest against an adversary; equality of keys across processes
and machines (the replay digest covers it, since keys are part of it).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.events import BlocksPublished, BlocksReused, Event
from kvproof.invariants.property import Check, Claim, EventHandler

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
        self._tag_of_key: dict[tuple[int, bytes], int] = {}
        self._key_of_tag: dict[tuple[int, int], bytes] = {}

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        return {BlocksPublished: self._published, BlocksReused: self._reused}

    def _published(self, event: BlocksPublished) -> None:
        request = self.books.known.get(event.request)
        if request is None or (event.row + len(event.blocks)) * self.block_size > request.length:
            return  # LIFE, VALID
        if len(self._tag_of_key) > _REMEMBERED:
            self._forget()
        group = event.group
        position = event.row * self.block_size - 1
        for block, key in zip(event.blocks, event.keys, strict=True):
            position += self.block_size
            tag = request.tags[position]
            known_tag = self._tag_of_key.setdefault((group, key), tag)
            known_key = self._key_of_tag.setdefault((group, tag), key)
            if known_tag != tag:
                self._collision(event, block, key)
                return
            if known_key != key:
                self._unstable(event, block, known_key, key)
                return
        self.checked += 1

    def _collision(self, event: BlocksPublished, block: int, key: bytes) -> None:
        self.fail(
            f"block {block} of request {event.request} was published under key "
            f"{key.hex()[:12]}…, which stands for another prefix",
            group=event.group,
            block=block,
            request=event.request,
        )

    def _unstable(self, event: BlocksPublished, block: int, known: bytes, key: bytes) -> None:
        self.fail(
            f"block {block} of request {event.request} was published under key "
            f"{key.hex()[:12]}…, but the same prefix had key {known.hex()[:12]}… before",
            group=event.group,
            block=block,
            request=event.request,
        )

    def _forget(self) -> None:
        """Remember only what is findable, so that long runs stay flat in memory."""
        self._tag_of_key = {
            (books.group, key): tag
            for books in self.books.groups
            for key, tag in books.tag_of_key.items()
        }
        self._key_of_tag = {(group, tag): key for (group, key), tag in self._tag_of_key.items()}

    def _reused(self, event: BlocksReused) -> None:
        request = self.books.known.get(event.request)
        if request is None:
            return
        group = self.books.groups[event.group]
        position = event.row * self.block_size - 1
        for block in event.blocks:
            position += self.block_size
            key = group.key_of.get(block)
            if key is None or position >= request.length:
                return  # VALID, CAP
            if group.tag_of_key[key] != request.tags[position]:
                self.fail(
                    f"request {event.request} got a prefix hit on block {block}, which holds "
                    "another prefix",
                    group=event.group,
                    block=block,
                    request=event.request,
                )
                return
        self.checked += 1
