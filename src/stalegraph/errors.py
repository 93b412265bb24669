"""The errors that stalegraph raises, from the user's own mistakes to what a GPU would report."""


class StalegraphError(Exception):
    """Base of every error that stalegraph raises on purpose."""


class UsageError(StalegraphError, ValueError):
    """Bad input: the message names the argument, the value and what is allowed."""


class RungUnavailable(UsageError):
    """The rung that was asked for cannot run on this machine; the message says what is missing and what would do."""


class IllegalAddressError(StalegraphError, RuntimeError):
    """A kernel touched memory that is not mapped (CUDA error 700, an illegal memory access)."""


class DeviceAssertError(StalegraphError, RuntimeError):
    """A kernel's own assert failed (CUDA error 710, device-side assert triggered)."""


class OutOfMemoryError(StalegraphError, MemoryError):
    """The device has no room for an allocation; the message says how much was asked for and how much there is."""


class CaptureError(StalegraphError, RuntimeError):
    """An operation that a capturing stream does not permit, or a graph used in the wrong state."""


class StaleReadError(StalegraphError, RuntimeError):
    """Strict mode only: a replayed node read a block that was freed or handed to another tensor since capture."""
