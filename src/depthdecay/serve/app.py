"""The routes: OpenAI's API, health, metrics, and the page."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match

from depthdecay import __version__
from depthdecay.engine.plan_choice import DEFAULT_OVER
from depthdecay.engine.request import prepare_request
from depthdecay.serve.api_errors import ApiError, json_response, shortened
from depthdecay.serve.depth_choice import Depths
from depthdecay.serve.guards import Guard, Scope
from depthdecay.serve.metrics import Metrics
from depthdecay.serve.reading import BodyReader, hung_up
from depthdecay.serve.responses import Account, ApiAnswer, as_api_error
from depthdecay.serve.schema import Asked, ChatRequest, CompletionRequest
from depthdecay.serve.tokenizing import Tokenizing
from depthdecay.serve.worker import Ticket, Worker

logger = logging.getLogger("depthdecay.serve")
T = TypeVar("T")

LEAST_TOP_P = 1e-9  # at this value only the most likely token is left


@dataclass(frozen=True)
class ServeSettings:
    """The operator's settings for the HTTP side."""

    model_name: str
    api_key: str | None = None
    max_body_bytes: int = 2**20
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: frozenset[str] | None = None  # accepted names in the Host header; None: any
    control_tokens_in_content: bool = False  # whether a message's text may contain control tokens, such as turn ends


class CheckedRoute(APIRoute):
    """A route whose body we parse ourselves. Its signature still describes the body, for the OpenAPI schema."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        (body,) = self.dependant.body_params

        async def handle(request: Request) -> Response:
            service: Service = request.app.state.service
            asked = await service.bodies.read(request, body.field_info.annotation)  # type: ignore[arg-type]
            response: Response = await self.endpoint(asked, request)
            return response

        return handle


def make_app(worker: Worker, settings: ServeSettings) -> FastAPI:
    """The app owns the worker: it starts and stops it."""
    service = Service(worker, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        service.close()
        await run_in_threadpool(worker.stop)

    about: dict[str, Any] = {"title": "depthdecay", "version": __version__, "responses": _ERRORS}
    app = FastAPI(**about, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)

    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await service.answer("text", asked, request)

    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        return await service.answer("chat", asked, request)

    for path, endpoint in (("/v1/completions", completions), ("/v1/chat/completions", chat_completions)):
        app.router.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            tags=["OpenAI"],
            responses=_ERRORS,
            route_class_override=CheckedRoute,
        )

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> Response:
        return json_response({"object": "list", "data": [service.model_card()]})

    @app.get("/v1/models/{name:path}", tags=["OpenAI"])
    async def model(name: str) -> Response:
        service.require_model(name)
        return json_response(service.model_card())

    @app.get("/health", tags=["operation"])
    async def health() -> Response:
        ready = worker.state == "ready"
        return json_response({"status": worker.state}, 200 if ready else 503)

    @app.get("/metrics", tags=["operation"])
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        html, policy = _page()
        return HTMLResponse(html, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        html, policy = _docs()
        return HTMLResponse(html, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})

    def path_of(scope: Scope) -> str:
        """The route's path, also for requests refused before it; never an arbitrary path from a client."""
        found = (getattr(route, "path", "other") for route in app.routes if route.matches(scope)[0] != Match.NONE)
        return next(found, "other")

    app.add_middleware(
        Guard,
        api_key=settings.api_key,
        max_body_bytes=settings.max_body_bytes,
        allowed_hosts=settings.allowed_hosts,
        path_of=path_of,
        seen=service.saw_request,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


class Service:
    """One model behind the routes."""

    def __init__(self, worker: Worker, settings: ServeSettings) -> None:
        self.worker = worker
        self.engine = worker.batcher.engine
        self.settings = settings
        self.depths = Depths(self.engine)
        self.metrics = Metrics(worker)
        worker.on_step = self.metrics.step
        self.created = int(time.time())
        # A short answer is mostly warm-up, so the reachable speed-up grows with the length that it is averaged over.
        self.most_speedups = {tokens: self.depths.most_speedup(tokens) for tokens in (16, 32, 64, 128, 256, 512, 1024)}
        self.bodies = BodyReader()
        vocabulary = self.engine.stack.model.get_input_embeddings().weight.shape[0]
        self.tokenizing = Tokenizing(self.engine.tokenizer, vocabulary, worker.batcher.max_positions)

    def close(self) -> None:
        self.bodies.close()
        self.tokenizing.close()

    def saw_request(self, path: str, status: int) -> None:
        self.metrics.requests.labels(path, str(status)).inc()

    def model_card(self) -> dict[str, Any]:
        about = {
            "num_layers": self.engine.stack.num_layers,
            "default_mode": self.engine.row_mode,
            "max_speedup": self.most_speedups[DEFAULT_OVER],
            "max_speedup_over": self.most_speedups,
            "max_tokens": self.worker.batcher.max_positions,
            "chat": bool(getattr(self.engine.tokenizer, "chat_template", None)),
            "exact": self.worker.batcher.inexact is None,
            "inexact_because": self.worker.batcher.inexact,
        }
        name = self.settings.model_name
        return {"id": name, "object": "model", "created": self.created, "owned_by": "depthdecay", "depth_decay": about}

    def require_model(self, name: str | None) -> None:
        if name not in (None, self.settings.model_name):
            message = f"the model {shortened(str(name))!r} is not served here; use {self.settings.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def answer(self, kind: str, asked: CompletionRequest | ChatRequest, request: Request) -> Response:
        account = Account()
        self.require_model(asked.model)
        ticket, mode = await _unless_hung_up(request, self._submit(asked))
        log = request.state.log
        log.update(mode=mode, prompt_tokens=_prompt_tokens(asked, ticket), sequences=len(ticket.ids))
        answer = ApiAnswer(
            kind=kind,
            id=f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{request.state.request_id}",
            model=self.settings.model_name,
            mode=mode,
            num_layers=self.engine.stack.num_layers,
            tell_depths=asked.depth_decay.depths,
            tokenizer=self.engine.tokenizer,
            ticket=ticket,
            prompt_tokens=log["prompt_tokens"],
            account=account,
            include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        )
        if asked.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return EventStream(answer.events(self._told), lambda: self._finished(answer, log), headers)
        return json_response(await self._collected(answer, request, log))

    async def _submit(self, asked: CompletionRequest | ChatRequest) -> tuple[Ticket, str]:
        """Check the counts first, then tokenize each prompt once, whatever `n` is, then queue the request."""
        prompts: list[Any]
        if isinstance(asked, ChatRequest):
            prompts = [[message.plain() for message in asked.messages]]
        else:
            prompts = list(asked.prompts())
        place = self.worker.reserve(len(prompts) * asked.n)
        try:
            async with asyncio.timeout(place.deadline - time.monotonic()):
                prepared, mode, plan = await self._prepare(asked, prompts)
                return await self.worker.submit(place, prepared, plan, mode, _logprobs(asked)), mode
        except Exception as error:
            raise self._told(error) from error
        finally:
            self.worker.release(place)

    async def _prepare(self, asked: CompletionRequest | ChatRequest, prompts: list[Any]) -> Any:
        limit, most = max_tokens(asked), self.worker.batcher.max_positions
        top_p = None if asked.top_p is None else max(asked.top_p, LEAST_TOP_P)
        settings: dict[str, Any] = {"temperature": asked.temperature, "top_p": top_p, "seed": asked.seed}
        settings |= {"frequency_penalty": asked.frequency_penalty, "presence_penalty": asked.presence_penalty}
        settings |= {"logit_bias": asked.token_biases(), "stop": asked.stop, "chat": False}
        settings["control_tokens_in_content"] = self.settings.control_tokens_in_content
        ids = await self.tokenizing.ids(prompts, settings)

        def complete() -> Any:
            mode, plan = self.depths.resolve(asked.depth_decay, None if limit is None else min(limit, most))
            prepared = prepare_request(self.engine, ids, limit, settings)
            # Like the model's context, the server's limit shortens an answer; finish_reason is then "length".
            limits = [min(own, most - len(prompt)) for own, prompt in zip(prepared.own_limits, ids, strict=True)]
            prepared.own_limits = [own for own in limits for _ in range(asked.n)]
            prepared.prompts = [list(prompt) for prompt in prepared.prompts for _ in range(asked.n)]
            return prepared, mode, plan

        return await run_in_threadpool(complete)

    async def _collected(self, answer: ApiAnswer, request: Request, log: dict[str, Any]) -> dict[str, Any]:
        """The whole answer, unless the client disconnects first."""
        try:
            return await _unless_hung_up(request, answer.collect())
        except Exception as error:
            raise self._told(error) from error
        finally:
            self._finished(answer, log)

    def _finished(self, answer: ApiAnswer, log: dict[str, Any]) -> None:
        """Clean up, however the answer ended: nothing of it stays in the batch."""
        self.worker.cancel(answer.ticket)
        account = answer.account
        self.metrics.answered(account)
        whole = all(choice.result is not None for choice in answer.choices.values())
        if not whole:
            self.metrics.broken_off.inc()
        depth = answer.depth_account(with_depths=False)
        log.update(whole=whole, tokens=account.tokens, layer_speedup=round(depth["layer_speedup"], 3))
        if account.first_token is not None:
            log["first_token_seconds"] = round(account.first_token - account.started, 4)

    def _told(self, error: Exception) -> ApiError:
        told = self.worker.too_late() if isinstance(error, TimeoutError) else as_api_error(error)
        if told.status == 500:
            logger.error("request failed", exc_info=error)
        return told


class EventStream(StreamingResponse):
    """Server-sent events that clean up after themselves, even if the client disconnects before the first one."""

    def __init__(self, events: AsyncIterator[str], finished: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.finished = finished

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.finished()


def max_tokens(asked: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(asked, ChatRequest) and asked.max_completion_tokens is not None:
        return asked.max_completion_tokens
    return asked.max_tokens


def _logprobs(asked: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(asked, ChatRequest):
        return (asked.top_logprobs or 0) if asked.logprobs else None
    return asked.logprobs


def _prompt_tokens(asked: Asked, ticket: Ticket) -> int:
    """With n answers a prompt is prefilled n times but counts once, as with OpenAI."""
    return sum(map(len, ticket.request.prompts)) // asked.n


async def _unless_hung_up(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise hung_up()
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    headers = dict(error.headers or {})
    if "GET" in headers.get("Allow", ""):
        headers["Allow"] += ", HEAD"
    return ApiError(error.status_code, str(error.detail), code=code).response(headers)


async def _unexpected(_: Request, error: Exception) -> Response:
    logger.error("request failed", exc_info=error)
    return as_api_error(error).response()


_PROBLEM = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "An error, in OpenAI's format", "content": {"application/json": {"schema": _PROBLEM}}}
}


@functools.cache
def _page() -> tuple[str, str]:
    """The page, and a policy that allows only its own script and style, and requests to this server."""
    html = (files("depthdecay.serve") / "page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hashes(html, 'script')}; style-src {_hashes(html, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


@functools.cache
def _docs() -> tuple[str, str]:
    """FastAPI's API page, and a policy for it: its script and style come from one CDN, everything else from here."""
    html = bytes(get_swagger_ui_html(openapi_url="/openapi.json", title="depthdecay").body).decode()
    cdn = "https://cdn.jsdelivr.net"
    policy = (
        f"default-src 'none'; script-src {cdn} {_hashes(html, 'script')}; style-src {cdn} 'unsafe-inline'; "
        "connect-src 'self'; img-src https://fastapi.tiangolo.com data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return html, policy


def _hashes(html: str, tag: str) -> str:
    """Hashes of the page's inline scripts or styles, as a policy lists them."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode() for inline in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
