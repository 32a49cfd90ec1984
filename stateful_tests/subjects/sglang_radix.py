"""SGLang's RadixCache as a subject: a tree whose nodes have slots of one kind."""

from __future__ import annotations

from typing import Any

from kvproof.stateful_tests.subjects.sglang_told import SglangSubject


class SglangRadixSubject(SglangSubject):
    """Drives one RadixCache.  Raises SubjectUnavailable where SGLang 0.5.23 is not installed."""

    name = "sglang:radix"

    def _new_tree(self) -> Any:
        return self._sglang.new_tree(self.configuration)

    def part(self, node: Any, group: int) -> Any:
        return node

    def _check_at_rest(self) -> None:
        counted = self.tree.protected_size()
        locked = sum([len(node.key) for node, _ in self.nodes(0) if node.lock_ref])
        if counted != locked:
            raise ValueError(f"{counted} tokens are counted as protected, and {locked} are locked")
