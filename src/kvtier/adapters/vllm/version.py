"""Which vLLM this adapter is for."""

from __future__ import annotations

import vllm
from kvtier.errors import ConfigurationError

SUPPORTED_VERSIONS = ("0.32",)
"""Major and minor version of the releases that the tests run against."""


def check_vllm_version() -> None:
    """Raises ConfigurationError if the installed vLLM is not a supported one."""
    version = str(vllm.__version__)
    if not any(version == supported or version.startswith(f"{supported}.") for supported in SUPPORTED_VERSIONS):
        allowed = ", ".join(f"{supported}.*" for supported in SUPPORTED_VERSIONS)
        raise ConfigurationError(f"vLLM is {version}; this kvtier supports {allowed}")
