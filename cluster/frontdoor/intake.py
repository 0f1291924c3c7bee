"""What comes before an answer is made, the same for every API: who refuses is counted, who is gone is not answered."""

from __future__ import annotations

from collections.abc import Awaitable

from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from cluster.frontdoor import http_errors
from cluster.frontdoor.http_errors import HttpProblem
from cluster.frontdoor.serving import Serving
from cluster.routing.metrics import Metrics
from paceline.errors import InvalidRequest


async def counted(made: Awaitable[Response], metrics: Metrics) -> Response:
    """The reply that ``made`` gives. A request that does not reach the router is counted as refused."""
    try:
        return await made
    except ClientDisconnect:
        return Response(status_code=400)  # nobody reads it
    except (InvalidRequest, HttpProblem):
        metrics.request_refused(InvalidRequest.__name__)
        raise


def check_model(router: Serving, model: str | None) -> str:
    """The model's name in answers. Raises HttpProblem when the request names another one."""
    info = router.model_info()
    http_errors.check_model(model, info.names)
    return info.model
