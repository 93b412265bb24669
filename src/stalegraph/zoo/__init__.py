"""Replicas of public bugs and of confirmed suspects, buggy and fixed side by side, that an audit must tell apart."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from stalegraph.errors import UsageError

# Name -> class of bug, in the order of the hazard map; M is the control, with no broken invariant.
# The second part holds what was found in released builders (stalegraph.vllm.suspects), with a report to file for each.
REPLICAS = {
    "rebound_kept": "A",
    "rebound_dropped": "A",
    "orphan_cast": "B",
    "grown_workspace": "C",
    "recarved_pool": "E",
    "wrong_slice": "F",
    "baked_scalar": "G",
    "short_launch": "H",
    "padded_row": "I1",
    "recycled_pinned": "J2",
    "look_alike": "M",
    "gathered_indices": "A",
    "copied_metadata": "A",
    "split_microbatch": "A",
    "warmup_plan": "B",
}
FORMS = ("buggy", "fixed")


def module(name: str) -> ModuleType:
    """The replica's module, with its classes Buggy and Fixed."""
    if name not in REPLICAS:
        raise UsageError(f"replica is {name!r}; allowed: {', '.join(REPLICAS)}")
    return import_module(f"stalegraph.zoo.{name}")


def load(name: str, form: str = "buggy"):
    """The class of one form of a replica."""
    if form not in FORMS:
        raise UsageError(f"form is {form!r}; allowed: {', '.join(FORMS)}")
    return getattr(module(name), form.capitalize())


__all__ = ["REPLICAS", "FORMS", "module", "load"]
