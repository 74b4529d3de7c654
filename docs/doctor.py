"""Writes docs/doctor.md: what `kvd doctor` can find, from its catalog.

python docs/doctor.py > docs/doctor.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvd.diagnosis.findings import KINDS

HEAD = """\
# kvd doctor

Prompts do not hit, and nobody says why: `kvd doctor` walks from the engines over their events and
the index to questions and choices, and names what is wrong, with evidence and a remedy.

```
$ kvd doctor
error: not_zmq: worker 1 rank 0 of llama-3-8b/default
    found   tcp://gpu1:8000 accepts connections and began with 'HTTP/1.1 400 Bad Request': ...
    remedy  register the port of the engine's KV events (`endpoint` of --kv-events-config; ...
```

(Shortened.) Addresses and credentials are those of
[`kvd status`](operations.md#check-its-health), which counts findings, too; the first face that
answers is asked. Exit code 0: nothing is wrong; 1: there are findings; 2: kvd cannot be asked.
`--json` writes `{"findings": [{"name", "severity", "subject", "evidence", "remedy"}]}`.

`GET /diagnose` is on every face and needs the scope `read`. With `?probe=1`, as `kvd doctor` asks
unless told `--no-probe`, kvd looks at registered addresses to which it has no connection, and at
replay endpoints: one connection each, 2 s for an answer, 10 s in all, 1,024 addresses. Four
diagnoses run at once; more are 503.

## From nothing to a diagnosed fault

1. `make run` sets everything up, and starts kvd in front of two simulated engines; the first time
   that takes two or three minutes, most of it for building. In another terminal:
2. `.venv/bin/kvd doctor` says `nothing is wrong`.
3. Make the mistake that most people make first, an engine's HTTP port in place of that of its
   events:

   ```
   curl -s http://127.0.0.1:8090/register -H 'Content-Type: application/json' \
     -d '{"instance_id":7,"endpoint":"tcp://127.0.0.1:8080","model_name":"demo","block_size":16}'
   ```

   The answer is `{"status":"ok"}`: ZeroMQ connects in the background, and kvd goes on trying.
4. `.venv/bin/kvd doctor` takes three seconds, prints the finding above for `worker 7 rank 0 of
   demo/default`, and exits with 1.
5. Take it out, and ask for a model that nobody serves:

   ```
   curl -s http://127.0.0.1:8090/unregister -H 'Content-Type: application/json' \
     -d '{"instance_id":7,"model_name":"demo"}'
   curl -s http://127.0.0.1:8090/query -H 'Content-Type: application/json' \
     -d '{"model_name":"demo2","token_ids":[1,2,3]}'
   ```

   Of the first fault nothing is said any more; the other one is `model_name_mismatch`, with
   `demo`, the name that is registered. It is forgotten in five to ten minutes.

## What it finds

An `error` costs hits or requests; a `warning` may. Requests that were refused or dropped, and
bookings, count for five to ten minutes. Salts and adapters are compared after 20 prompts on either
side, matches after 100 questions. kvd subscribes to every topic, so none is wrong. Not found are
ranks missing behind the last one that is registered, and clocks of engines, on which nothing
depends. Of one name 64 findings are shown; one more counts the others.

| finding | severity | means | remedy |
|---|---|---|---|
"""


def shown(remedy: str) -> str:
    """Returns a template as a table shows it: fields in capitals."""
    named = re.sub(r"(?<!{){(\w+)[^}]*}", lambda field: field[1].upper(), remedy)
    return named.replace("{{", "{").replace("}}", "}").replace("|", "\\|")


def page() -> Iterator[str]:
    """Yields the page, piece by piece."""
    yield HEAD
    for name, kind in KINDS.items():
        remedies = [kind.remedy] if isinstance(kind.remedy, str) else kind.remedy.values()
        remedy = "; or ".join(map(shown, remedies))
        yield f"| `{name}` | {kind.severity} | {kind.means} | {remedy} |\n"


if __name__ == "__main__":
    sys.stdout.write("".join(page()))
