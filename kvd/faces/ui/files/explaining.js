// Why a request goes where it goes: the answers of /explain, as tables.

import { read } from "./asking.js";
import { $, counted, make, number } from "./drawing.js";

const MOST = 24; // candidates and events shown
const REASONS = {
  end_of_prompt: "all of it",
  evicted: "evicted",
  cleared: "cleared with its cache",
  restarted: "its engine restarted",
  never_stored: "never stored",
  not_reusable: "held, but not what else its reuse needs",
  unknown: "not known: too long ago",
  other_salt: "cached with another salt",
  other_adapter: "cached with another adapter",
  other_tenant: "cached for another tenant",
  not_predicted: "not booked there lately",
  not_heard: "its events are not heard",
  no_events: "it sends no events",
};

const nameOf = ({ worker_id: worker, dp_rank: rank }) => `${worker}:${rank}`;
const ago = (seconds) => `${number(seconds, 1)} s ago`;

function whyOf({ ended, stream }) {
  const doubt = stream === null || stream === "exact" ? "" : `; its stream is ${stream}`;
  return endOf(ended) + doubt;
}

function endOf(ended) {
  const { why, tier, age_s: age, at_block: block, elsewhere_blocks: elsewhere } = ended;
  if (why === "end_of_prompt") return REASONS[why];
  const told = [`block ${number(block)}: ${REASONS[why]}`];
  if (elsewhere !== null) told.push(counted(elsewhere, "block"));
  if (tier) told.push(`on ${tier}`);
  if (age !== null) told.push(ago(age));
  return told.join(", ");
}

function costOf({ terms, preference }) {
  const shown = terms.filter(({ cost }) => cost)
      .map(({ name, cost }) => `${name} ${number(cost, 2)}`);
  return (preference === 1 ? "" : `${number(preference, 3)} × `) + shown.join(" + ");
}

function table(titles, rows) {
  const head = make("tr", "", ...titles.map((title) => make("th", "", title)));
  const body = rows.map((row) => make("tr", "", ...row.map((cell) => make("td", "", cell))));
  return make("div", "wide",
      make("table", "", make("thead", "", head), make("tbody", "", ...body)));
}

function choiceOf(choice, blocks) {
  const { chosen, runner_up: second, by, refusal, candidates } = choice;
  const said = [];
  if (choice.phase) said.push(choice.phase);
  if (by) said.push(`by ${by.replace("_", " ")}, policy ${choice.router_policy}`);
  if (refusal) said.push(refusal.replaceAll("_", " "));
  if (chosen) {
    const chance = chosen.chance < 1 ? ` by a chance of ${number(100 * chosen.chance)}%` : "";
    said.push(`chosen ${nameOf(chosen)}${chance}`);
  }
  if (second) {
    const behind = second.behind === null ? "" : `, ${number(second.behind, 2)} behind`;
    said.push(`runner-up ${nameOf(second)}${behind}`);
  }
  const titles = ["worker", "chance", "cost", "terms", "cached", "why no more"];
  const rows = candidates.slice(0, MOST).map((each) => [
    nameOf(each),
    each.shut_out?.replaceAll("_", " ") ??
        (each.chance === undefined ? "–" : `${number(100 * each.chance)}%`),
    number(each.cost, 2),
    each.terms ? costOf(each) : "",
    `${number(each.blocks)} of ${number(blocks)}`,
    whyOf(each),
  ]);
  const left = candidates.length + choice.more_candidates - rows.length;
  const parts = [make("p", "", said.join("; ")), table(titles, rows)];
  if (left > 0) parts.push(make("p", "soft", `and ${number(left)} more`));
  return parts;
}

// Returns elements that show an explanation.
export function explanation(found) {
  const parts = found.choices.flatMap((choice) => choiceOf(choice, found.blocks));
  const events = found.timeline.slice(-MOST).map((each) => [
    ago(each.age_s), nameOf(each), each.kind, each.tiers.join(", "),
    each.from === each.to ? "all" : `blocks ${number(each.from)} to ${number(each.to)}`,
  ]);
  if (events.length) {
    parts.push(make("p", "soft", "What happened to its blocks:"));
    parts.push(table(["when", "worker", "what", "tier", "blocks"], events));
  }
  return parts;
}

// Shows why the request of a recent choice went where it went, as far as that is still known.
export async function explain(choice) {
  const { request, cached_tokens: cached, prefill_tokens: left, queued_tokens: queued } = choice;
  $("explained-title").textContent = request;
  const chosen = make("p", "", `Sent to ${nameOf(choice)}, which cached ${number(cached)} of ` +
    `${number(cached + left)} tokens and had ${number(queued)} queued: ` +
    `cost ${number(choice.cost, 2)}, ` +
    `among ${number(choice.candidates)} candidates.`);
  const now = make("div", "", make("p", "soft", "asking"));
  $("explained").replaceChildren(chosen, now);
  $("explained-dialog").showModal();
  try {
    const found = await read(`explain?${new URLSearchParams({ request_id: request })}`);
    const hint = "As if it came once more, now: its own booking counts in the load.";
    now.replaceChildren(make("p", "hint", hint), ...explanation(found));
  } catch (error) {
    const ended =
        "The request has ended, and with it what its prompt was: kvd explain takes the prompt.";
    now.replaceChildren(make("p", "soft", error.status === 404 ? ended : error.message));
  }
}
