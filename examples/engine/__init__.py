"""An engine to try kvd with: OpenAI's API and Anthropic's, a prefix cache, KV events; no model.

    server      connections and requests
    answers     sends answers, with the faults that a test wants
    api         answers in the form of each API, whole and as streams
    kept        responses that later requests continue
    transfers   prompts that one engine computes for another
    caches      prefix caches that publish KV events
    tokenizer   texts, messages and bodies as token ids
    options     what it pretends to be, and how fast it is

`python -m examples.engine --port 8000` runs one.
"""
