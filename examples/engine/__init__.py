"""An engine to try kvd with: OpenAI's API over HTTP, a real prefix cache, real KV events; no model.

    server      connections and requests, with the faults that it is told to have
    api         OpenAI's answers, whole and as streams
    transfers   prompts that one engine computes for another
    caches      prefix caches that publish KV events
    tokenizer   texts and messages as token ids
    options     what it pretends to be, and how fast it is

`python -m examples.engine --port 8000` runs one.
"""
