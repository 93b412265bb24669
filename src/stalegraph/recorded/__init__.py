"""Evidence from hardware, checked in with its provenance, and the case generators that rebuild its inputs anywhere."""

from stalegraph.recorded.store import Provenance, Record, available, load, names, root, shown

__all__ = ["Provenance", "Record", "available", "load", "names", "root", "shown"]
