"""Builders of real vLLM releases that look as if they move what a captured graph reads, driven on the simulated GPU.

Each suspect executes the release's own builder and its own forward method, with the kernels of
`stalegraph.vllm.kernels` below; it captures one step, replays others, and compares addresses and outputs. The verdict
is one of "confirmed" (a captured kernel reads memory that no step refreshes, and the output is wrong), "latent" (it
does, and the output was right in every step tried), "cleared" (nothing that a captured kernel reads moved).
"""

from stalegraph.vllm.suspects.examination import Case, Examination, examine
from stalegraph.vllm.suspects.lineup import SUSPECTS, Suspect, examine_release
from stalegraph.vllm.suspects.release import release_modules

__all__ = ["SUSPECTS", "Suspect", "Case", "Examination", "examine", "examine_release", "release_modules"]
