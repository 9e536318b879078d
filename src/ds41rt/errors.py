"""The exceptions that callers of ds41rt branch on. Every message names the thing, its value and what to do.

Errors of the driver itself live in `ds41rt.cu.result`, which derives from `Ds41Error` as well.
"""


class Ds41Error(Exception):
    """Base of every error that ds41rt raises on purpose."""


class ConfigError(Ds41Error):
    """A model configuration, a setting or an environment variable is missing, unknown or out of range."""


class CheckpointError(Ds41Error):
    """A checkpoint file is missing, truncated, corrupt or does not match the model configuration."""


class CheckpointReadError(CheckpointError, OSError):
    """The system failed to read a checkpoint file whose content is not at fault: trying again may work."""


class InputError(Ds41Error, ValueError):
    """A value handed to the library (a token id, a prompt, a handle, an argument) is not usable."""


class ContextFullError(InputError):
    """The sequence has reached the engine's maximum context."""


class UnsupportedError(Ds41Error):
    """This build, platform or machine cannot do what was asked."""


class CacheError(Ds41Error):
    """The expert cache could not serve a layer: reads failed or it is smaller than one token's working set."""


class NotFiniteError(Ds41Error):
    """The router saw a not-finite logit or weight: the step is refused instead of returning garbage."""


class EngineBusyError(Ds41Error):
    """Another thread is inside the engine: one thread at a time may use it."""


class EngineClosedError(Ds41Error):
    """The engine, or the sequence, was closed (by the caller or after a sticky device error)."""
