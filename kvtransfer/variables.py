"""The environment variables that some role knows.

A machine may give all roles one environment, so a role passes over the variables of the others; any other KVSPLICE_*
name is a typing error. A test holds this list equal to the settings of the roles' configs.
"""

from typing import Final

ENV_PREFIX: Final = "KVSPLICE_"

KNOWN_VARIABLES: Final[frozenset[str]] = frozenset(
    {
        "KVSPLICE_API_KEY",
        "KVSPLICE_BLOCK_SIZE",
        "KVSPLICE_CACHE",
        "KVSPLICE_CONTROL_HOST",
        "KVSPLICE_CONTROL_PORT",
        "KVSPLICE_CPU_THREADS",
        "KVSPLICE_CURVE_DIR",
        "KVSPLICE_CURVE_NAME",
        "KVSPLICE_DEAD_AFTER_S",
        "KVSPLICE_DECODE",
        "KVSPLICE_DEVICE",
        "KVSPLICE_DTYPE",
        "KVSPLICE_ENFORCE_EAGER",
        "KVSPLICE_ENABLE_PREFIX_CACHING",
        "KVSPLICE_FAILOVER_TIMEOUT_S",
        "KVSPLICE_FIRST_TOKEN_TIMEOUT_S",
        "KVSPLICE_GATEWAY",
        "KVSPLICE_GATEWAY_DEAD_AFTER_S",
        "KVSPLICE_GPU_MEMORY_UTILIZATION",
        "KVSPLICE_HEAD_TIMEOUT_S",
        "KVSPLICE_HEARTBEAT_INTERVAL_S",
        "KVSPLICE_HOST",
        "KVSPLICE_INSECURE",
        "KVSPLICE_KERNELS",
        "KVSPLICE_KV_ADVERTISE_HOST",
        "KVSPLICE_KV_CACHE_DTYPE",
        "KVSPLICE_KV_CACHE_GIB",
        "KVSPLICE_KV_CHECKSUM",
        "KVSPLICE_KV_HOST",
        "KVSPLICE_KV_LINK",
        "KVSPLICE_KV_PORT",
        "KVSPLICE_KV_WINDOW_MIB",
        "KVSPLICE_KV_WIRE_DTYPE",
        "KVSPLICE_LEASE_S",
        "KVSPLICE_LOG_LEVEL",
        "KVSPLICE_MAX_BODY_BYTES",
        "KVSPLICE_MAX_CONCURRENT_REQUESTS",
        "KVSPLICE_MAX_CONNECTIONS",
        "KVSPLICE_MAX_MODEL_LEN",
        "KVSPLICE_MAX_NUM_BATCHED_TOKENS",
        "KVSPLICE_MAX_NUM_PREFILL_TOKENS",
        "KVSPLICE_MAX_NUM_SEQS",
        "KVSPLICE_MAX_RETRIES",
        "KVSPLICE_MAX_WAITING",
        "KVSPLICE_MODEL",
        "KVSPLICE_PORT",
        "KVSPLICE_PREFILL",
        "KVSPLICE_QUEUE_TIMEOUT_S",
        "KVSPLICE_READY_TIMEOUT_S",
        "KVSPLICE_REQUEST_TIMEOUT_S",
        "KVSPLICE_SAMPLE",
        "KVSPLICE_SCHEDULING_POLICY",
        "KVSPLICE_SEED",
        "KVSPLICE_SERVED_MODEL_NAME",
        "KVSPLICE_SHUTDOWN_TIMEOUT_S",
        "KVSPLICE_STALLED_AFTER_S",
        "KVSPLICE_STREAM_BUFFER_TOKENS",
        "KVSPLICE_URL",
        "KVSPLICE_WORKER_ID",
    }
)
