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

To find out why prompts do not hit, run `kvd doctor`. It checks engines, events, the index,
questions and choices, and names what is wrong, with evidence and a remedy:

```
$ kvd doctor
error: not_zmq: worker 1 rank 0 of llama-3-8b/default
    found   tcp://gpu1:8000 accepts connections and began with 'HTTP/1.1 400 Bad Request': ...
    remedy  register the port of the engine's KV events (`endpoint` of --kv-events-config; ...
```

(Shortened.) Addresses and credentials are those of
[`kvd status`](operations.md#check-its-health); the first face that answers is asked. Exit code 0:
nothing is wrong; 1: there are findings; 2: kvd cannot be asked. `--json` writes
`{"findings": [{"name", "severity", "subject", "evidence", "remedy"}]}`.

`GET /diagnose` is on every face and needs the scope `read`. With `?probe=1`, which `kvd doctor`
sends without `--no-probe`, kvd connects to registered addresses that it has no connection to,
and to replay endpoints: once each, 2 s for an answer, 10 s in all, 1,024 addresses
(`kvd_diagnosis_probes_left_out_total` counts those beyond). Four diagnoses run at once; more are
503. Bookings are counted of 4,096 workers (others: `kvd_diagnosis_bookings_uncounted_total`).

## From nothing to a diagnosed fault

1. `make run` starts kvd in front of two simulated engines; the first time it builds for two or
   three minutes. In another terminal, `.venv/bin/kvd doctor` says `nothing is wrong`.
2. Make the most common mistake, an HTTP port (here the gateway's) in place of that of an engine's
   events:

   ```
   curl -s http://127.0.0.1:8090/register -H 'Content-Type: application/json' \\
     -d '{"instance_id":7,"endpoint":"tcp://127.0.0.1:8080","model_name":"demo","block_size":16}'
   ```

   The answer is `{"status":"ok"}`: ZeroMQ connects in the background, and kvd keeps trying.
3. `.venv/bin/kvd doctor` prints the finding above within three seconds, for
   `worker 7 rank 0 of demo/default`, and exits with 1.
4. Take the worker out, and ask for a model that nobody serves:

   ```
   curl -s http://127.0.0.1:8090/unregister -H 'Content-Type: application/json' \\
     -d '{"instance_id":7,"model_name":"demo"}'
   curl -s http://127.0.0.1:8090/query -H 'Content-Type: application/json' \\
     -d '{"model_name":"demo2","token_ids":[1,2,3]}'
   ```

   The only finding is now `model_name_mismatch`, with the registered name `demo`, for five to ten
   minutes.

## What it finds

An `error` costs hits or requests; a `warning` may. Refused and dropped requests, and bookings,
count for five to ten minutes. Salts and adapters are compared after 20 prompts on either side,
matches after 100 questions. kvd subscribes to every topic, so none is wrong. It cannot find ranks
missing behind the last registered one. Of one name 64 findings are shown; one more counts the
others.

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
