"""Do the engines behind the gateway serve, and does the kvd that chooses for it answer?"""

from __future__ import annotations

from collections.abc import Iterator

from kvd.diagnosis.evidence import Evidence, KvdEvidence, UpstreamEvidence
from kvd.diagnosis.findings import Finding, found
from kvd.wire.urls import parse_dns


def check_gateway(evidence: Evidence) -> Iterator[Finding]:
    """Yields what is wrong with the gateway's engines, and with the kvds that choose for it."""
    if not evidence.upstreams and any(face.name == "gateway" for face in evidence.faces):
        yield found("upstreams_missing", "gateway", "no engine is behind it")
    for upstream in evidence.upstreams:
        yield from check_upstream(upstream)
    for kvd in evidence.kvds:
        yield from check_kvd(kvd)


def check_upstream(upstream: UpstreamEvidence) -> Iterator[Finding]:
    """Yields why an engine gets no requests, or why its events are not believed."""
    subject = f"upstream {upstream.url}"
    if upstream.problem:
        case = "engine" if parse_dns(upstream.url) is None else "name"
        yield found("upstream_unusable", subject, upstream.problem, case, endpoint=upstream.url)
    elif upstream.doubt:
        yield found("tokens_disagree", subject, upstream.doubt)


def check_kvd(kvd: KvdEvidence) -> Iterator[Finding]:
    """Yields why the gateway cannot ask a kvd elsewhere to choose."""
    if kvd.problem:
        yield found("kvd_unreachable", f"kvd {kvd.url}", kvd.problem, endpoint=kvd.url)
