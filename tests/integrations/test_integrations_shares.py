"""Tenants over HTTP, on both frameworks: where they come from, what a stranger gets, and where the time of an answer went."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from fastapi import HTTPException

import accel
from tests.http_support import affine_service, on_aiohttp, on_fastapi, row
from tests.model_support import affine

if TYPE_CHECKING:
    import numpy as np

SHARES = {"gold": 3, "free": 1}
TOKENS = {"of gold": "gold", "of free": "free", "of platinum": "platinum"}


def checked(request: Any) -> str:
    return TOKENS[request.headers["Authorization"]]


async def checked_elsewhere(request: Any) -> str:
    await asyncio.sleep(0)
    return TOKENS[request.headers["Authorization"]]


@pytest.fixture(params=[on_fastapi, on_aiohttp], ids=["fastapi", "aiohttp"])
def serving(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("tenant", [checked, checked_elsewhere])
@pytest.mark.parametrize("is_installed", [True, False])
async def test_what_is_checked_says_which_share_is_charged(serving: Any, tenant: Any, is_installed: bool, rng: np.random.Generator) -> None:
    route, options = ({}, {"tenant": tenant}) if is_installed else ({"tenant": tenant}, {})
    async with serving(affine_service(affine(rng), shares=SHARES), route, **options) as client:
        assert (await client.post({"x": row(rng)}, Authorization="of gold", **{"X-Tenant": "free"}))[0] == 200
        listed = {"items": [{"x": row(rng)} for _ in range(3)]}
        assert (await client.post(listed, "/m/list", Authorization="of free"))[0] == 200
        gold, free = client.service.statistics().tenants
        assert (gold.answered, free.answered) == (1, 3)
        assert gold.device_seconds > 0 < free.device_seconds


@pytest.mark.parametrize("path", ["/m", "/m/list"])
async def test_a_tenant_without_a_share_gets_403_and_nothing_runs(serving: Any, path: str, rng: np.random.Generator) -> None:
    item = {"x": row(rng)}
    async with serving(affine_service(affine(rng), shares=SHARES), {"tenant": checked}) as client:
        status, body, _ = await client.post(item if path == "/m" else {"items": [item]}, path, Authorization="of platinum")
        assert status == 403
        assert body == {
            "error": "UnknownTenantError",
            "detail": "The service has no share of the accelerator for this client.",
            "retryable": False,
            "generation": 1,
        }
        assert client.service.statistics().submitted == 0


async def test_a_client_that_is_not_known_gets_what_the_check_says(serving: Any, rng: np.random.Generator) -> None:
    def refuses(request: Any) -> str:
        raise HTTPException(401) if serving is on_fastapi else web.HTTPUnauthorized

    async with serving(affine_service(affine(rng), shares=SHARES), {}, tenant=refuses) as client:
        assert (await client.post({"x": row(rng)}))[0] == 401
        assert (await client.send(b"no json"))[0] == 401  # before the body is looked at


async def test_shares_need_something_that_says_the_tenant_and_the_other_way_round(serving: Any, rng: np.random.Generator) -> None:
    with pytest.raises(accel.InvalidArgumentError, match="nothing says which tenant"):
        await _open(serving(affine_service(affine(rng), shares=SHARES), {}))
    with pytest.raises(accel.InvalidArgumentError, match="which has no shares"):
        await _open(serving(affine_service(affine(rng)), {"tenant": checked}))
    for route, options in (({"tenant": "gold"}, {}), ({}, {"tenant": "gold"})):
        with pytest.raises(accel.InvalidArgumentError, match="function of the request"):
            await _open(serving(affine_service(affine(rng), shares=SHARES), route, **options))
    async with serving(affine_service(affine(rng)), {}, tenant=checked) as client:  # for the services that have shares: this one has none
        assert (await client.post({"x": row(rng)}))[0] == 200


async def _open(opened: Any) -> None:
    async with opened:
        pass


async def test_an_answer_says_where_its_time_went(serving: Any, rng: np.random.Generator) -> None:
    async with serving(affine_service(affine(rng)), {}) as client:
        _, _, headers = await client.post({"x": row(rng)})
        _, _, listed = await client.post({"items": [{"x": row(rng)} for _ in range(8)]}, "/m/list")
        assert "Server-Timing" not in (await client.post({"x": "wrong"}))[2]
    timing = re.fullmatch(r'queue;dur=(\d+\.\d{3}), device;dur=(\d+\.\d{3}), batch;desc="1"', headers["Server-Timing"])
    assert timing is not None, headers["Server-Timing"]
    assert 0 < float(timing[2]) < 1000
    assert re.search(r'batch;desc="[1-8]"$', listed["Server-Timing"])


@pytest.mark.parametrize("found", [None, 3, ["gold"], {"gold": 1}, b"gold", "x" * 10**6, "\ud800", object(), float("nan")], ids=type)
@pytest.mark.parametrize("is_awaited", [False, True])
async def test_what_is_no_tenant_gets_403_and_nothing_runs(serving: Any, found: Any, is_awaited: bool, rng: np.random.Generator) -> None:
    async def later(request: Any) -> Any:
        return found

    async with serving(affine_service(affine(rng), shares=SHARES), {"tenant": later if is_awaited else lambda request: found}) as client:
        status, body, _ = await client.post({"x": row(rng)})
        assert (status, body["error"]) == (403, "UnknownTenantError")
        assert client.service.statistics().submitted == 0
        assert (await client.get("/metrics"))[0] == 200


@pytest.mark.parametrize("error", [KeyError("secret"), RecursionError("secret")], ids=type)
async def test_a_check_that_raises_is_an_error_of_the_application(serving: Any, error: Exception, rng: np.random.Generator) -> None:
    async def fails(request: Any) -> str:
        raise error

    async with serving(affine_service(affine(rng), shares=SHARES), {"tenant": fails}) as client:
        status, body, _ = await client.post({"x": row(rng)})
        assert status == 500
        assert b"secret" not in body
        assert client.service.statistics().submitted == 0


async def test_a_check_that_hangs_is_cancelled_at_the_timeout_of_the_route(serving: Any, rng: np.random.Generator) -> None:
    ended: list[bool] = []

    async def hangs(request: Any) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return "gold"

    async with serving(affine_service(affine(rng), shares=SHARES), {"tenant": hangs, "timeout": 0.05}) as client:
        status, body, _ = await client.post({"x": row(rng)})
        assert (status, body["error"], ended) == (504, "DeadlineExceededError", [True])
        assert client.service.statistics().submitted == 0
