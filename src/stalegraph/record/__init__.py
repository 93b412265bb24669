"""`stalegraph record`: what a Hopper GPU does, written down so that the simulator can be held to it."""

from stalegraph.record.command import add_arguments, main

__all__ = ["add_arguments", "main"]
