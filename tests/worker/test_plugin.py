"""The plugin of a worker: messages for unknown bindings, and lease tasks."""

import asyncio
import functools
import logging

from jobrunner.worker.outcome import Failure
from jobrunner.worker.plugin import (
    PLUGIN_NAME,
    BindingOptions,
    WorkspaceHost,
    binding_of,
    host,
    lease_key,
)

HERE = "tcp://here"


def in_a_loop(test):
    """Run an async test; every one of them within a time."""

    @functools.wraps(test)
    def run(**arguments):
        asyncio.run(asyncio.wait_for(test(**arguments), 20))

    return run


class FakeWorker:
    address = HERE

    def __init__(self):
        self.handlers, self.plugins = {}, {}

    async def plugin_add(self, plugin, name, catch_errors):
        self.plugins[name] = plugin
        plugin.setup(self)


OPTIONS = BindingOptions(job="j", seed=0, attempt=0, can_move=False, silence_seconds=60)


@in_a_loop
async def test_messages_for_unknown_bindings_and_failures_are_answered():
    host, worker = WorkspaceHost(), FakeWorker()
    host.setup(worker)
    [call] = worker.handlers.values()
    run = {"call": "run", "binding": "gone", "number": 1}
    assert await call(**run, wait_seconds=0) == {"status": "unknown"}
    assert await call(**run, lease="x", wait_seconds=9) == {"status": "unknown"}
    logging.disable()
    reply = await call(call="bind", binding="b")
    logging.disable(logging.NOTSET)
    assert "'bind' that it does not understand" in str(Failure(**reply["failure"]).exception())
    await host.teardown(worker)
    assert worker.handlers == {}


@in_a_loop
async def test_a_lease_cancelled_before_its_thread_starts_does_not_block():
    host = WorkspaceHost()
    host.setup(FakeWorker())
    key = lease_key("binding", host.incarnation, 0)
    assert binding_of(key) == "binding"
    host.transition(key, "ready", "executing")
    assert list(host._leases) == [key]
    host.transition(key, "executing", "released")
    assert host._leases == {}
    host.run_lease(key, OPTIONS)  # would block forever if the lease were there
    host.transition("somebody else's key", "ready", "executing")
    host.transition(("tuple", 1), "ready", "executing")
    assert host._leases == {}


@in_a_loop
async def test_a_binding_that_is_about_to_come_is_waited_for():
    worker = FakeWorker()
    plugin = WorkspaceHost(linger_seconds=0)
    await worker.plugin_add(plugin, PLUGIN_NAME, catch_errors=False)
    await host("b", worker)
    [call] = worker.handlers.values()
    first = {"call": "apply", "binding": "b", "number": 1, "wait_seconds": 0.01}
    assert await call(**first) == {"status": "waiting"}
    await call(call="release", binding="b")
    await asyncio.sleep(0.01)
    assert worker.plugins == worker.handlers == {}


@in_a_loop
async def test_the_plugin_stays_until_nothing_is_expected():
    worker = FakeWorker()
    plugin = WorkspaceHost(expect_seconds=0.02, linger_seconds=0)
    await worker.plugin_add(plugin, PLUGIN_NAME, catch_errors=False)
    first, second = await host("a", worker), await host("b", worker)
    assert first == second == worker.plugins[PLUGIN_NAME].incarnation
    [call] = worker.handlers.values()
    await call(call="release", binding="a")
    await asyncio.sleep(0)
    assert PLUGIN_NAME in worker.plugins  # b may still come
    while worker.plugins:
        await asyncio.sleep(0.005)
    assert worker.handlers == {}
    assert await host("c", worker) != first
