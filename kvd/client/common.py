"""Calls that every face has, and calls of faces with replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from kvd.client.calls import Call, Face, How, asked
from kvd.client.explanation import Explanation, Question
from kvd.client.picture import Branches, Picture


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: docs/doctor.md lists their names, severities and remedies."""

    name: str
    severity: str
    subject: str
    evidence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The faults that keep prompts from matching; without faults `findings` is empty."""

    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class PotentialLoad:
    """The load that a rank would have with one more prompt, in tokens, blocks and requests."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int


@dataclass(frozen=True, slots=True)
class Listener:
    """The event stream of one rank.

    `stream` is the stream's health: `exact`, `recovering`, `degraded` (`loss` says why) or
    `stale`. `last_seq` is the number of the last applied batch.
    """

    endpoint: str
    status: str
    stream: str
    last_error: str | None = None
    loss: str | None = None
    quiet: str | None = None
    quiet_s: int | None = None
    ignored_events: Mapping[str, int] | None = None
    last_seq: int | None = None
    publisher_id: str | None = None


class EveryFace(Face[How]):
    """The calls that every face answers."""

    @asked("GET /health", repeatable=True)
    def health(self) -> Call[None]:
        """Returns as long as the daemon lives."""
        return Call()

    @asked("GET /metrics", repeatable=True)
    def metrics(self) -> Call[str]:
        """Returns the face's metrics in Prometheus' text format."""
        return Call()

    @asked("GET /diagnose", repeatable=True)
    def diagnose(self, *, probe: bool = False) -> Call[Diagnosis]:
        """Lists faults that keep prompts from matching; with `probe`, tests engines for 10 s."""
        return Call(query={"probe": "1" if probe else None})

    @asked("POST /explain", repeatable=True)
    def explain(self, **question: Unpack[Question]) -> Call[Explanation]:
        """Explains, candidate by candidate, which rank would be chosen for a prompt."""
        return Call(question)

    @asked("GET /explain", repeatable=True)
    def explain_request(self, request_id: str) -> Call[Explanation]:
        """Explains which rank would be chosen for the prompt of a live booking."""
        return Call(query={"request_id": request_id})

    @asked("GET /openapi.json", repeatable=True)
    def document(self) -> Call[Mapping[str, Any]]:
        """Returns the OpenAPI document of the face."""
        return Call()

    @asked("GET /picture", repeatable=True)
    def picture(self) -> Call[Picture]:
        """Returns what `kvd top` shows: ranks, rates, streams and recent choices."""
        return Call()

    @asked("GET /branches", repeatable=True)
    def branches(
        self,
        model_name: str,
        *,
        tenant_id: str | None = None,
        block_size: int | None = None,
        above: str | None = None,
        after: str | None = None,
    ) -> Call[Branches]:
        """Lists a page of the branches of the prefix tree, newest first.

        These are the branches below the branch named `above`, or without it those at the start of
        prompts. With `after`, the page begins behind the branch of that name.
        """
        return Call(
            query={
                "model_name": model_name,
                "tenant_id": tenant_id,
                "block_size": block_size,
                "above": above,
                "after": after,
            }
        )


class WithReplicas(Face[How]):
    """The calls of faces that exchange their requests with replicas."""

    @asked("POST /replica_sync/register_peer", repeatable=True)
    def register_replica(self, endpoint: str, *, curve_server_key: str | None = None) -> Call[None]:
        """Makes the daemon listen to the replica that publishes at `endpoint`, tcp or ipc."""
        return Call({"endpoint": endpoint, "curve_server_key": curve_server_key})

    @asked("POST /replica_sync/deregister_peer", repeatable=True, ends=True)
    def deregister_replica(self, endpoint: str) -> Call[None]:
        """Makes the daemon stop listening to a replica."""
        return Call({"endpoint": endpoint})

    @asked("GET /replica_sync/peers", repeatable=True)
    def replicas(self) -> Call[tuple[str, ...]]:
        """Lists the endpoints of the replicas that the daemon listens to."""
        return Call()


def partition_members(model_name: str | None, tenant_id: str | None) -> dict[str, str | None]:
    """Returns the parameters that restrict a list to a model and tenant."""
    return {"model_name": model_name, "tenant_id": tenant_id}
