"""Metrics of the shared state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from kvd.shared_state.catalog import CatalogStats
from kvd.shared_state.known import KnownState
from kvd.telemetry.metrics import Family, by_label, counter, gauge


def shared_state_families(known: KnownState, losses: int) -> Iterator[Family]:
    """Yields the families of /metrics; `losses` counts the sessions that ended by a fault."""
    fleet, mirror, outbox = known.fleet, known.mirror, known.outbox
    stats, of_mirror, of_views = fleet.stats, mirror.stats, known.views.stats
    progress = mirror.progress
    help = "Whether the server of the shared state is connected"
    yield gauge("kvd_shared_state_connected", help, int(fleet.is_connected))
    help = "Number of other processes that share this state"
    yield gauge("kvd_shared_state_replicas", help, len(fleet.members))
    help = "Number of other processes whose latest steps have not arrived here"
    yield gauge("kvd_shared_state_behind", help, len(progress.behind))
    help = "Number of live requests whose rank is not registered here"
    yield gauge("kvd_shared_state_waiting_requests", help, len(mirror.waiting))
    help = "Total size of the steps that wait for the server in bytes"
    yield gauge("kvd_shared_state_unsent_bytes", help, len(outbox))
    help = "Number of connections to the server that were lost"
    yield counter("kvd_shared_state_losses_total", help, losses)
    for name, help, count in (
        ("entries_written", "Number of entries written to the stream", stats.entries_written),
        ("entries_read", "Number of entries read from the stream", stats.entries_read),
        ("bytes_written", "Total size of the steps written in bytes", stats.bytes_written),
        ("bytes_read", "Total size of the steps read in bytes", stats.bytes_read),
        ("unreadable", "Number of entries and views that could not be read", stats.unreadable),
        (
            "unknown_form",
            "Number of entries skipped because another version wrote them",
            stats.unknown_form,
        ),
        ("refused", "Number of writes that the server refused", stats.refused),
        (
            "wrong_keys",
            "Number of tries to connect that found a key of another program on the server",
            stats.wrong_keys,
        ),
        ("lost_stream", "Number of times that the server had lost entries", stats.lost_stream),
        ("given_up", "Number of gaps given up because their process is gone", stats.given_up),
        ("steps", "Number of steps of other processes applied", of_mirror.steps),
        ("bookings", "Number of requests of other processes booked", of_mirror.bookings),
        ("ended", "Number of requests that a view showed to have ended", of_mirror.ended),
        ("replaced", "Number of bookings that gave way to an earlier one", of_mirror.replaced),
        (
            "left_out",
            "Number of requests of other processes not booked because a limit was reached",
            mirror.left_out,
        ),
        ("gaps", "Number of gaps in the steps of other processes", progress.gaps),
        (
            "holes",
            "Number of times that steps of this process were dropped because too many waited",
            outbox.holes,
        ),
        ("views_read", "Number of views of other processes merged", of_mirror.views),
        ("views_written", "Number of views written", of_views.written),
        ("view_bytes_written", "Total size of written views in bytes", of_views.written_bytes),
        ("view_bytes_read", "Total size of views read in bytes", of_views.read_bytes),
    ):
        yield counter(f"kvd_shared_state_{name}_total", help, count)
    help = "Number of shared registrations, by outcome"
    yield by_label(
        "kvd_shared_registrations_total",
        "counter",
        help,
        "outcome",
        {each.name: getattr(known.catalog.stats, each.name) for each in fields(CatalogStats)},
    )
