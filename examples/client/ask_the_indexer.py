"""Which worker has most of a prompt cached? By its tokens, and by its hashes.

python -m examples.client.ask_the_indexer http://127.0.0.1:8090 MODEL TOKEN,TOKEN,...
"""

from __future__ import annotations

import sys

import trio

from kvd.client import AsyncClient, Refused, local_hashes


async def ask(url: str, model_name: str, token_ids: list[int]) -> None:
    async with AsyncClient(indexer=url) as kvd:
        try:
            scores = await kvd.indexer.query(model_name, token_ids, streams=True)
        except Refused as refused:
            print(f"kvd does not answer that: {refused.text}")
            return
        if not scores.instances:
            print("no worker has cached anything yet")
        for instance, overlap in scores.instances.items():
            print(f"worker {instance} can reuse {overlap.longest_matched} tokens")

        # The same without telling kvd the tokens: hash them where they are.
        for worker in await kvd.indexer.workers(model_name=model_name):
            hashes = local_hashes(token_ids, worker.block_size)
            assert await kvd.indexer.query_by_hash(model_name, hashes, streams=True) == scores
            break  # none: the workers are registered on another face, which knows their block size


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    url, model_name, tokens = sys.argv[1:]
    trio.run(ask, url, model_name, [int(each) for each in tokens.split(",")])
