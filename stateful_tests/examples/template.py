"""A subject to copy: your engine in the place of ``Cache``, and calls to it in these methods.

    kvproof check --subject kvproof.stateful_tests.examples.template:Template

``docs/adapters.md`` explains each method and each word of the semantics.
"""

from __future__ import annotations

from kvproof.invariants.outcomes import BLOCKS_IN_USE
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.stateful_tests.adapter import Adapter, Refused, Request
from kvproof.stateful_tests.examples.tiny_cache import Cache


class Template(Adapter):
    name = "template"
    # What your engine promises: the check demands that and no more.
    semantics = Semantics(
        publishes="after_compute",
        duplicates="private",
        release_order="tail_first",
        eviction_order="lru",
        exact_admission=True,
    )

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.cache = Cache(configuration.blocks, configuration.block_size)
        self.tables: dict[int, list[int]] = {}

    # -- what your engine does: all of it, or nothing and Refused ----------------------------------

    def admit(self, request: Request) -> int:
        table = self.tables[request.number] = []
        hits = self.cache.hits(request.marked_tokens)
        if not self.cache.take(table, len(request.tokens), hits):
            raise Refused
        return len(hits) * self.configuration.block_size

    def grow(self, request: Request, tokens: int) -> None:
        if not self.cache.take(self.tables[request.number], len(request.tokens)):
            raise Refused

    def release(self, request: Request) -> None:
        self.cache.give_back(self.tables[request.number])

    def publish(self, request: Request) -> None:
        tokens = request.marked_tokens[: request.computed]
        self.cache.publish(self.tables[request.number], tokens)

    def evict(self, blocks: int) -> None:
        cached = [block for block in self.cache.free if block in self.cache.key_of]
        self.cache.forget(cached[:blocks])

    def reset(self) -> None:
        if any(self.cache.refs):
            raise Refused(BLOCKS_IN_USE)
        self.cache.forget(self.cache.free)

    # -- what your engine has: as it is, nothing recomputed ----------------------------------------

    def table(self, request: Request) -> list[int]:
        return self.tables[request.number]

    def free_blocks(self) -> list[int]:
        return self.cache.free

    def ref_counts(self) -> list[int]:
        return self.cache.refs

    def index(self) -> dict[bytes, list[int]]:
        return {key: [block] for key, block in self.cache.block_of.items()}
