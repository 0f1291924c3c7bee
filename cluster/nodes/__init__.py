"""Nodes as processes. Ray reads these variables once, so they are set before any module in here imports it."""

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray would otherwise hide GPUs from actors that ask for none; Paceline assigns devices itself.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray would run nodes at niceness 15, so that whatever else the host does comes before a token.
os.environ.setdefault("RAY_worker_niceness", "0")
# Ray would start a cluster of its own for a call that comes while none is joined, as one does at the end.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
# Ray would end every process that has not reached its GCS for a minute: the router, and all nodes of a private Ray.
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "604800")
