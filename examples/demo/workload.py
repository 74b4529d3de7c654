"""Makes up the demo's traffic: conversations that share system prompts and grow turn by turn.

Texts have no apostrophes: they are shown between apostrophes, to be pasted into a shell.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

Message = dict[str, str]

LIVE_CONVERSATIONS = 12
MAX_TURNS = 6

SYSTEM_PROMPTS = (
    "You are the support assistant of a bicycle shop. Answer politely and in at most three "
    "sentences. Look the order up before you say anything about its delivery. Never promise a "
    "refund; hand such requests to a colleague. Prices are in euro and contain the tax. When you "
    "are not sure which part the customer means, ask for the frame number first.",
    "You review changes to a web service. Read the whole diff before you comment. Name the file "
    "and the line, say what goes wrong and for whom, and propose the smallest change that mends "
    "it. Do not comment on style, the formatter does that. If there is nothing worth saying, "
    "answer with the single word fine and nothing else at all.",
    "You plan trips by train. Prefer few changes over a short journey, and leave ten minutes for "
    "each change. State departure and arrival with the platform. When the last train of the day "
    "is involved, say so clearly and offer an earlier one. Fares are only estimates; tell the "
    "traveller to check them, and never invent a connection that you did not find.",
)

QUESTIONS = (
    "The front brake squeaks when it rains, is that covered by the guarantee?",
    "Can you check this once more and tell me what changed since yesterday?",
    "I would like to go on Friday after four and be there before nine in the evening.",
    "That does not help me, could you explain the second point in simpler words?",
    "What happens if two of them arrive at the same time?",
    "Please compare both options and tell me which one you would choose.",
    "My colleague says it worked before the update, how can that be?",
    "Thanks, and what would it cost for three people with one bicycle?",
)


@dataclass(slots=True)
class Conversation:
    """The messages of one dialogue so far, and how many turns it still has."""

    messages: list[Message]
    turns_left: int


class Workload:
    """An endless stream of turns over a bounded set of live conversations."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._live = [self._start() for _ in range(LIVE_CONVERSATIONS)]

    def ask(self) -> Conversation:
        """Returns a conversation that ends with a new question."""
        index = self._random.randrange(len(self._live))
        if self._live[index].turns_left == 0:
            self._live[index] = self._start()
        conversation = self._live[index]
        conversation.turns_left -= 1
        conversation.messages.append({"role": "user", "content": self._question()})
        return conversation

    def _start(self) -> Conversation:
        system = {"role": "system", "content": self._random.choice(SYSTEM_PROMPTS)}
        return Conversation([system], self._random.randint(1, MAX_TURNS))

    def _question(self) -> str:
        """Returns two sentences and a number, so that conversations hardly ever stay the same."""
        first, second = self._random.sample(QUESTIONS, 2)
        return f"{first} {self._random.randrange(10_000)} {second}"
