"""`GET /admin/workers` and `POST /admin/workers/{worker_id}/role`: what operators say over HTTP.

The paths exist only on a gateway with --enable-admin or --admin-key; who may call them is the business of
`gateway.limits`, what comes of it that of `gateway.administration`.
"""

from typing import Annotated, Any, Final

import msgspec
from starlette.routing import BaseRoute, Route

from gateway.administration import Administration, SwitchOrder, WorkerReport
from gateway.asgi import Receive, Scope, Send, send_json
from gateway.errors import InvalidFieldError, excerpt
from gateway.service import read_request
from gateway.validation import FieldRules
from kvtransfer.messages import MAX_DRAIN_S
from kvtransfer.worker_facts import Role

WORKERS_PATH: Final = "/admin/workers"
SWITCH_PATH: Final = "/admin/workers/{worker_id}/role"


class SwitchRoleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`timeout_s`: what running requests get to end in, seconds; without it, the worker's --shutdown-timeout-s.
    `force`: even if no other worker serves the role that this one has."""

    role: str
    timeout_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_DRAIN_S)] | None = None
    force: bool = False


_RULES: Final = FieldRules(tolerated=frozenset(), unsupported={})


def admin_routes(admin: Administration) -> list[BaseRoute]:
    return [
        Route(WORKERS_PATH, ListWorkers(admin), methods=["GET"]),
        Route(SWITCH_PATH, SwitchRoleEndpoint(admin), methods=["POST"]),
    ]


class ListWorkers:
    """An ASGI application."""

    def __init__(self, admin: Administration) -> None:
        self._admin = admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"workers": [_shown(report) for report in self._admin.workers()]})


class SwitchRoleEndpoint:
    """An ASGI application. 202: the worker has been told, and is on its way; 200: it has the role already."""

    def __init__(self, admin: Administration) -> None:
        self._admin = admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await read_request(scope, receive, SwitchRoleRequest, _RULES)
        order = SwitchOrder(_role_named(request.role), request.timeout_s, request.force)
        report = self._admin.switch(scope["path_params"]["worker_id"], order)
        await send_json(send, _shown(report), status=200 if report.switching_to is None else 202)


def _role_named(name: str) -> Role:
    """Raises InvalidFieldError for what is no role."""
    try:
        return Role(name)
    except ValueError:
        names = ", ".join(role.value for role in Role)
        raise InvalidFieldError(f"role: {excerpt(name)!r} is no role; there are {names}", param="role") from None


def _shown(report: WorkerReport) -> dict[str, Any]:
    return {
        "id": report.worker_id,
        "role": report.role.value,
        "state": report.state.value,
        "switching_to": None if report.switching_to is None else report.switching_to.value,
        "can_switch": report.can_switch,
        "num_running": report.load.num_running,
        "num_waiting": report.load.num_waiting,
        "kv_usage": report.load.kv_usage,
    }
