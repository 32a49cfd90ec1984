"""The checks, one property a file, in the order in which they look."""

from __future__ import annotations

from kvproof.invariants.checks.atom import Atom
from kvproof.invariants.checks.cap import Cap
from kvproof.invariants.checks.cons import Cons
from kvproof.invariants.checks.excl import Excl
from kvproof.invariants.checks.key import Key
from kvproof.invariants.checks.life import Life
from kvproof.invariants.checks.met import Met
from kvproof.invariants.checks.order import Order
from kvproof.invariants.checks.pin import Pin
from kvproof.invariants.checks.prov import Prov
from kvproof.invariants.checks.quies import Quies
from kvproof.invariants.checks.ref import Ref
from kvproof.invariants.checks.resume import Resume_
from kvproof.invariants.checks.valid import Valid
from kvproof.invariants.checks.xfer import Xfer
from kvproof.invariants.property import Check

CHECKS: tuple[type[Check], ...] = (
    Life,
    Cons,
    Ref,
    Excl,
    Pin,
    Order,
    Cap,
    Atom,
    Quies,
    Xfer,
    Prov,
    Valid,
    Key,
    Resume_,
    Met,
)
"""Ownership ledger first, then bytes and their provenance (XFER moves those that PROV reads), then
the request's own story and the figures."""
