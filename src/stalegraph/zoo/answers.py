"""The answers to the three exercises. Try them first."""

from __future__ import annotations

from dataclasses import dataclass

from stalegraph.zoo.replica import Expected


@dataclass(frozen=True)
class Answer:
    """What an audit must say of an exercise, and the public report that it is modelled on."""

    expected: Expected
    report: str


ANSWERS = {
    1: Answer(Expected("E", ("reused",), "workspace"), "AITER #5393"),
    2: Answer(Expected("C", ("moved", "freed", "reused"), "scratch"), "FlashInfer #4398, #4666"),
    3: Answer(Expected("D", ("reused", "foreign-pool"), "hidden"), "vllm-omni #6457"),
}
