"""kvtier in vLLM. Name this module as `kv_connector_module_path` and `KVTierConnector` as `kv_connector`.

The plug-in interface of vLLM changes between its releases; all of it stays in here. Importing this with a vLLM
that is not supported raises ConfigurationError.
"""

from kvtier.adapters.vllm.version import check_vllm_version

check_vllm_version()

from kvtier.adapters.vllm.logs import join_vllm_log  # noqa: E402

join_vllm_log()

from kvtier.adapters.vllm.connector import KVTierConnector  # noqa: E402
from kvtier.adapters.vllm.spec import KVTierOffloadingSpec  # noqa: E402

__all__ = ["KVTierConnector", "KVTierOffloadingSpec"]
