"""A caller that leaves as its answer ends is not worth a traceback; whatever else gRPC logs is."""

from __future__ import annotations

import logging

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # compiled, and not in the stubs

from paceline.rpc.calls import make_server

STATUS = 'Failed "execute_batch": (<grpc._cython.cygrpc.SendStatusFromServerOperation object at 0x7f00>,)'
MESSAGE = 'Failed "execute_batch": (<grpc._cython.cygrpc.SendMessageOperation object at 0x7f00>,)'


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (cygrpc.ExecuteBatchError(STATUS), False),
        (cygrpc.ExecuteBatchError(MESSAGE), True),
        (RuntimeError(STATUS), True),
    ],
)
async def test_what_grpc_logs_of_an_rpc(error: Exception, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    make_server([], 1)
    make_server([], 1)  # a second server of the process
    log = logging.getLogger("grpc._cython.cygrpc")
    try:
        raise error
    except type(error):
        log.exception("ExecuteBatchError raised in core by servicer method [%s]", "/paceline.v1.DecodeNode/Decode")
    log.error("without an exception")
    assert [record.getMessage() for record in caplog.records].count("without an exception") == 1
    assert ("/paceline.v1.DecodeNode/Decode" in caplog.text) is told
