"""Sends a completion to the engine that kvd chooses, booked there for as long as it runs.

python -m examples.client.reserve_around_a_request http://127.0.0.1:8092 MODEL TOKEN,TOKEN,...
"""

from __future__ import annotations

import json
import sys

import httpx
import trio

from kvd.client import AsyncClient


async def complete(url: str, model_name: str, token_ids: list[int]) -> None:
    asked = {"model": model_name, "prompt": token_ids, "max_tokens": 8, "stream": True}
    async with AsyncClient(selection=url) as kvd, httpx.AsyncClient() as http:
        async with kvd.reserve(model_name=model_name, token_ids=token_ids) as choice:
            print(f"worker {choice.worker} rank {choice.dp_rank} at {choice.endpoint}")
            answer = http.stream("POST", f"{choice.endpoint}/v1/completions", json=asked)
            async with answer as response:
                response.raise_for_status()
                prefilling = True
                async for line in response.aiter_lines():
                    if prefilling:  # the first token: the prompt is processed
                        await choice.prefill_complete()
                        prefilling = False
                    if line.startswith("data: {"):
                        print(json.loads(line.removeprefix("data: "))["choices"][0]["text"], end="")
        # Here the reservation is freed, and so it is after an error or a cancellation.
        print(f"\nfreed: {choice.freed}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    url, model_name, tokens = sys.argv[1:]
    trio.run(complete, url, model_name, [int(each) for each in tokens.split(",")])
