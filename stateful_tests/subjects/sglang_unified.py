"""SGLang's UnifiedRadixCache as a subject: a tree of nodes with parts, one for each kind of layer.

It is the cache that SGLang serves with unless it is told otherwise.  Its core is written twice:
this is the one in Python.  The one in Rust, which is the default, has the same interface, and shows
nobody which node is locked.
"""

from __future__ import annotations

from typing import Any

from kvproof.stateful_tests.subjects.sglang_told import SglangSubject


class SglangUnifiedSubject(SglangSubject):
    """Drives one UnifiedRadixCache for layers of full attention."""

    name = "sglang:unified"

    def _new_tree(self) -> Any:
        return self._sglang.new_unified(self.configuration)

    def part(self, node: Any, group: int) -> Any:
        return node.component(self._sglang.full)

    def _check_at_rest(self) -> None:
        self.tree.sanity_check()
