"""Do questions match what engines cache, or are they refused before?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvd.diagnosis.evidence import Evidence, FaceEvidence, ModelEvidence
from kvd.diagnosis.findings import Finding, found, minutes, partition_name

# Prompts that are needed on a side before a lack of salts, or of adapters, counts: a fleet's first
# prompts are often probes, which have neither.
ENOUGH = 20

_HOST = re.compile(r"[\w.:\[\]-]+", re.ASCII)  # the characters of hosts' names and addresses

SHOWN_TOKENS = 4  # first tokens of prompts that a finding shows


def check_questions(evidence: Evidence) -> Iterator[Finding]:
    """Yields why questions may not match, by model, and why faces refused requests."""
    for model in evidence.models:
        yield from check_model(model)
    for face in evidence.faces:
        if face.refused:
            yield _host(face, evidence.watched_s)


def check_model(model: ModelEvidence) -> Iterator[Finding]:
    """Yields what separates the questions about a model from its events."""
    if model.parked and not model.blocks and not model.announced.prompts:
        evidence = f"{model.parked} blocks are known by hash alone, and none by its tokens"
        yield found("tokens_missing", f"model {partition_name(model.key)}", evidence)
    sides = [*_check_salts(model), *_check_adapters(model)]
    yield from sides
    if model.is_unmatched and not sides:
        yield _unmatched(model)


def _check_salts(model: ModelEvidence) -> Iterator[Finding]:
    asked, announced = model.asked, model.announced
    # Prompts of engines that announce no salts are matched without them.
    announces_salts = announced.salted > 0 or announced.announcing_salts == announced.prompts
    if announces_salts:
        yield from _one_sided(
            model, "salt_one_sided", "a cache salt", asked.salted, announced.salted
        )


def _check_adapters(model: ModelEvidence) -> Iterator[Finding]:
    asked, announced = model.asked.adapted, model.announced.adapted
    yield from _one_sided(model, "adapter_one_sided", "an adapter", asked, announced)


def _one_sided(
    model: ModelEvidence, name: str, what: str, asked: int, announced: int
) -> Iterator[Finding]:
    """Yields a finding if only questions, or only events, have prompts with `what`."""
    questions, stored = model.asked.prompts, model.announced.prompts
    if min(questions, stored) < ENOUGH or max(asked, announced) < ENOUGH or min(asked, announced):
        return
    if announced:
        evidence = (
            f"{announced} of {stored} prompts in events have {what}, none of {questions} questions"
        )
    else:
        evidence = (
            f"{asked} of {questions} questions have {what}, none of {stored} prompts in events"
        )
    yield found(name, f"model {partition_name(model.key)}", evidence)


def _unmatched(model: ModelEvidence) -> Finding:
    subject = f"model {partition_name(model.key)}"
    evidence = f"0 of {model.questions} questions matched any of {model.blocks} blocks"
    asked, announced = model.asked.first_tokens, model.announced.first_tokens
    if asked and announced and not asked & announced:
        evidence += f"; questions begin with token {_some(asked)}, events with {_some(announced)}"
        return found("tokens_disagree", subject, evidence)
    if model.asked.prompts:
        return found("no_match_ever", subject, evidence, "tokens")
    evidence += "; all were by hash"
    return found("no_match_ever", subject, evidence, "hashes", size=model.block_size)


def _host(face: FaceEvidence, watched_s: float) -> Finding:
    evidence = f"{face.refused} requests in {minutes(watched_s)}, the last for {face.host!r}"
    # Anybody can send any Host, and operators paste the remedy into a shell.
    host = face.host if _HOST.fullmatch(face.host) else "HOST"
    return found("host_refused", f"{face.name} face", evidence, host=host)


def _some(tokens: frozenset[int]) -> str:
    shown = ", ".join(map(str, sorted(tokens)[:SHOWN_TOKENS]))
    return shown + (", ..." if len(tokens) > SHOWN_TOKENS else "")
