"""``instrument``: spans and metrics of this process to OpenTelemetry, and with its SDK to Prometheus or anywhere else.

Metrics are observed when they are collected. What they tell was counted before, or is asked of whoever knows it, so that no
call pays for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from lz_compile import __version__
from lz_compile.errors import ArgumentError, IntegrationError
from lz_compile.ground import events, health, telemetry

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
    from opentelemetry.trace import TracerProvider

#: A number, and what tells it apart from others of its metric.
_Found = Iterator[tuple[int | float, dict[str, str]]]

_observed: set[int] = set()


def instrument(tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Send spans of compiles and metrics to OpenTelemetry from now on.

    Spans: ``lz_compile.compile`` for a graph, and in it ``recognise``, ``prove`` and ``measure``. Metrics are listed in
    docs/telemetry.md. Calling it again changes the tracer; each meter provider gets its metrics once.

    Args:
        tracer_provider: by default the global one.
        meter_provider: by default the global one.

    Raises:
        IntegrationError: ``opentelemetry-api`` is not installed.
        ArgumentError: what is given provides no tracer, or no meter.
    """
    try:
        from opentelemetry import metrics, trace
    except ImportError as error:
        expected = "'s API (pip install 'lz-compile[otel]')"
        raise IntegrationError("opentelemetry", expected, error) from error
    for name, provider, what in (
        ("tracer_provider", tracer_provider, "tracer"),
        ("meter_provider", meter_provider, "meter"),
    ):
        if provider is not None and not callable(getattr(provider, f"get_{what}", None)):
            raise ArgumentError("instrument", name, f"of OpenTelemetry, which has get_{what}", repr(provider))
    telemetry.trace_with(trace.get_tracer("lz_compile", __version__, tracer_provider), _failed)
    meters = metrics.get_meter_provider() if meter_provider is None else meter_provider
    if id(meters) not in _observed:
        _observed.add(id(meters))
        _kept.append(meters)
        _observe(meters.get_meter("lz_compile", __version__))


def uninstrument() -> None:
    """Send no more spans. Metrics are collected as long as their provider is."""
    telemetry.trace_with(None, _failed)


#: Providers that were seen: as long as they are kept, no other one has their identity.
_kept: list[Any] = []


def _failed(error: Exception) -> None:
    uninstrument()
    events.record("TELEMETRY_FAILED", "sending spans, which is stopped", error)


def _observe(meter: Meter) -> None:
    from opentelemetry.metrics import Observation

    def observing(find: Callable[[], _Found]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            return [Observation(number, labels) for number, labels in find()]

        return observe

    for name, find, unit, text in _COUNTERS:
        meter.create_observable_counter(f"lz_compile.{name}", [observing(find)], unit, text)
    for name, find, unit, text in _GAUGES:
        meter.create_observable_gauge(f"lz_compile.{name}", [observing(find)], unit, text)


# ---- what is found ---------------------------------------------------------------------------------------------------


def _counted(name: str) -> Callable[[], _Found]:
    def find() -> _Found:
        for labels, number in telemetry.counts(name).items():
            yield number, dict(labels)

    return find


def _failures() -> _Found:
    for each in health.failures():
        yield each.count, {"kernel": each.kernel_id}


def _retired() -> _Found:
    for name, reason in health.retirements().items():
        yield 1, {"kernel": name, "reason": reason.code}


def _cached(name: str) -> Callable[[], _Found]:
    def find() -> _Found:
        eager = sys.modules.get("lz_compile.api.eager")  # nobody who compiles only has one
        found = {} if eager is None else eager.statistics()
        if name in found:
            yield found[name], {}

    return find


def _served(field: str) -> Callable[[], _Found]:
    def find() -> _Found:
        serving = sys.modules.get("lz_compile.tools.serving")
        states = [] if serving is None else [each.state() for each in list(serving.served)]
        for number, state in enumerate(states):
            known = {"server": str(number)}
            if field == "calls":
                yield state.compiled, {**known, "how": "compiled"}
                yield state.padded, {**known, "how": "padded"}
                for why, count in state.eager.items():
                    yield count, {**known, "how": f"eager: {why}"}
            else:
                found = getattr(state, field)
                yield len(found) if field == "failures" else found, known

    return find


_COUNTERS: tuple[tuple[str, Callable[[], _Found], str, str], ...] = (
    (
        "graphs",
        _counted("graphs"),
        "{graph}",
        "graphs that were compiled, and compiled again for other sizes or values",
    ),
    ("matches", _counted("matches"), "{match}", "operations that were recognised"),
    ("rewrites", _counted("rewrites"), "{rewrite}", "operations that were replaced by a kernel"),
    ("near_misses", _counted("near misses"), "{miss}", "operations that were nearly recognised, by the reason why not"),
    ("events", _counted("events"), "{event}", "events by code, fallbacks among them"),
    ("kernel.failures", _failures, "{call}", "calls that a kernel failed and its fallback completed"),
    ("decision_cache.hits", _cached("hits"), "{call}", "eager calls whose kernel was decided before"),
    ("decision_cache.misses", _cached("misses"), "{call}", "eager calls whose kernel had to be decided"),
    ("serve.calls", _served("calls"), "{call}", "calls of a served model, by how they were answered"),
    ("serve.compile_time", _served("compile_s"), "s", "seconds that a served model was compiled for"),
)
_GAUGES: tuple[tuple[str, Callable[[], _Found], str, str], ...] = (
    ("kernel.retired", _retired, "{kernel}", "kernels and libraries that are not chosen again in this process"),
    ("decision_cache.entries", _cached("entries"), "{entry}", "decisions that are kept"),
    ("serve.waiting", _served("waiting"), "{shape}", "shapes that wait for the compiler"),
    ("serve.ready", _served("ready"), "{shape}", "shapes that are compiled"),
    ("serve.failed", _served("failures"), "{shape}", "shapes that cannot be compiled"),
)
