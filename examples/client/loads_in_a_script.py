"""Prints what every rank works on: the blocking client, for scripts and threads.

python -m examples.client.loads_in_a_script unix:/run/kvd/selection.sock [TOKEN_FILE]
"""

from __future__ import annotations

import sys

from kvd.client import Client, ClientError


def main(address: str, token_file: str | None = None) -> int:
    with Client(selection=address, token_file=token_file, timeout_s=5) as kvd:
        try:
            listed = kvd.selection.loads()
        except ClientError as error:  # unreachable, refused, or no kvd
            print(error, file=sys.stderr)
            return 1
        for fleet in listed:
            for rank in fleet.loads:
                print(
                    f"{fleet.model_name}: worker {rank.worker_id} rank {rank.dp_rank} has "
                    f"{rank.active_requests} requests, {rank.potential_prefill_tokens} tokens to "
                    f"prefill and {rank.potential_decode_blocks} blocks in use"
                )
        if kvd.stats.retries:
            print(f"asked again {kvd.stats.retries} times", file=sys.stderr)
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
