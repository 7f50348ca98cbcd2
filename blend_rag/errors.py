"""What can go wrong, in words a user can act on.

Every message says what to change. The CLI prints the message as one line and exits non-zero.
"""


class BlendRagError(Exception):
    """Base of every error this package raises on purpose."""


class PromptError(BlendRagError, ValueError):
    """A prompt cannot be laid out: empty question, bad template, unusable separator."""


class PromptTooLongError(PromptError):
    """A prompt or a chunk does not fit into the model's context."""


class PolicyError(BlendRagError, ValueError):
    """A recompute policy or a sampling parameter that makes no sense."""


class ModelError(BlendRagError):
    """A model cannot be found, read or converted."""


class UnsupportedModelError(ModelError):
    """The model's attention is not plain RoPE with full attention."""


class SelfTestError(ModelError):
    """The model loaded, but blending it would give wrong answers."""


class CacheFolderError(BlendRagError, OSError):
    """The user's cache folder cannot be written."""


class CorpusError(BlendRagError, ValueError):
    """There are no documents to ask about, or they cannot be read."""


class StoreError(BlendRagError):
    """A KV store refuses an operation, for example because an object is larger than the store."""


class ConnectorError(BlendRagError, ValueError):
    """vLLM's configuration, or a request's parameters, cannot be blended."""


class ServerError(BlendRagError):
    """A server refuses a request, or is not what it has to be."""


class ServerUnreachableError(ServerError, ConnectionError):
    """A server cannot be reached, is overloaded, or has broken off."""


class ServerTimeoutError(ServerError, TimeoutError):
    """A server did not answer in time."""
