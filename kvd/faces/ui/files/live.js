// What is going on now: rates, streams, ranks, choices.

import { $, Curve, Stack, TIERS, counted, lastOf, make, number, say, share } from "./drawing.js";
import { explain } from "./explaining.js";

const POINTS = 60; // samples that kvd keeps
const HEALTH = { exact: "good", recovering: "fair", degraded: "bad", stale: "bad" };
const TILES = [
  ["requests_per_s", "Requests/s", (value) => number(value, 1), 0],
  ["live", "Live requests", number, 0],
  ["queued", "Queued", number, 0],
  ["cached_share", "Cached of prompts", share, 1],
  ["matched_share", "Questions matched", share, 1],
  ["events_per_s", "Events/s", (value) => number(value, 1), 0],
];
const FACE_PAGES = /^(tls:)?([^/]+:\d+)$/; // addresses that a browser can open
const EVERYWHERE = /^(0\.0\.0\.0|\[::\])(?=:)/; // this page's host has such an address, too

const nameOf = (each) => `${each.worker_id}:${each.dp_rank}`;
const placeOf = (each) =>
  each.tenant_id === "default" ? each.model_name : `${each.model_name}/${each.tenant_id}`;

// Returns a button that names the request of a recent choice and explains the choice.
function requestOf(choice) {
  const button = make("button", "text", choice.request);
  button.type = "button";
  button.title = "Explain this choice";
  button.addEventListener("click", () => explain(choice));
  return button;
}

class Tile {
  constructor([name, title, form, most]) {
    Object.assign(this, { name, form, most });
    this.value = make("div", "value");
    this.curve = new Curve(POINTS, `${title}, the last two minutes`);
    this.element = make("div", "tile", make("div", "name", title), this.value, this.curve.element);
    this.element.dataset.tile = name;
  }

  show(history) {
    const values = history[this.name];
    say(this.value, this.form(this.most ? lastOf(values) : values.at(-1)));
    this.curve.show(values, this.most || 1);
  }
}

class RankRow {
  constructor(rank) {
    this.name = make("strong", "", nameOf(rank));
    this.health = make("div", "health");
    this.requests = make("div", "requests");
    this.requests.dataset.name = "live";
    this.load = new Curve(POINTS, "live requests");
    this.cached = make("div", "cached");
    this.cached.dataset.name = "cached";
    this.hits = new Curve(POINTS, "cached share of the prompts sent here");
    this.stack = new Stack();
    this.held = make("span", "soft");
    this.why = make("div", "why");
    this.element = make(
      "div", "rank",
      make("div", "who", this.name, " ", make("span", "soft", placeOf(rank))),
      this.health, this.requests, make("div", "", this.load.element), this.cached,
      make("div", "", this.hits.element),
      make("div", "tiers", this.stack.element, this.held), this.why,
    );
  }

  show(rank, most, mostRequests) {
    const off = rank.lifecycle && rank.lifecycle !== "schedulable";
    const health = off ? rank.lifecycle : (rank.stream ?? "no events");
    this.health.className = `health ${off ? "bad" : (HEALTH[rank.stream] ?? "soft")}`;
    say(this.health, health);
    const load = rank.load;
    say(this.requests, load ? number(load.requests) : "–");
    this.requests.title = load
      ? `${number(load.prefill_tokens)} tokens to prefill, ` +
        `${number(load.decode_blocks)} blocks in use`
      : "";
    this.load.show(rank.requests, mostRequests);
    say(this.cached, share(lastOf(rank.cached_share)));
    this.hits.show(rank.cached_share, 1);
    const blocks = rank.blocks ?? {};
    this.stack.show(blocks, rank.total_blocks ?? most);
    const held = TIERS.reduce((all, tier) => all + (blocks[tier] ?? 0), 0);
    say(this.held, counted(held, "block"));
    const why = [rank.why, ...(rank.reasons ?? [])].filter(Boolean).join("; ");
    say(this.why, why);
    this.why.hidden = !why;
    this.text = `${placeOf(rank)} ${nameOf(rank)} ${health} ${why}`.toLowerCase();
  }
}

export class Live {
  constructor() {
    this.tiles = TILES.map((tile) => new Tile(tile));
    $("tiles").append(...this.tiles.map((tile) => tile.element));
    this.ranks = new Map();
    this.head = make("div", "rank head", ...[
      "worker", "stream", "live", "", "cached", "", "blocks by tier",
    ].map((text) => make("div", "", text)));
    $("ranks").append(this.head);
    $("rank-filter").addEventListener("input", () => this.filter());
  }

  show(picture) {
    for (const tile of this.tiles) tile.show(picture.history);
    this.showStreams(picture);
    this.showRanks(picture);
    this.showDecisions(picture.decisions);
    this.showFaces(picture.faces);
  }

  showStreams({ streams, models }) {
    const said = Object.entries(streams.counts).filter(([, count]) => count);
    const rows = said.map(([name, count]) =>
        make("span", HEALTH[name], `${number(count)} ${name}`));
    if (!rows.length) rows.push(make("span", "soft", "no event streams"));
    for (const model of models) {
      const asked =
          `${counted(model.blocks, "block")}, ${counted(model.questions, "question")}`;
      const row = make("span", "", `${placeOf(model)}: ${asked}`);
      if (model.never_matches) row.append(make("strong", "bad", ", none ever matched"));
      rows.push(row);
    }
    $("streams").replaceChildren(...rows);
    const doubtful = streams.doubtful.map((each) =>
      make("li", "", make("strong", HEALTH[each.stream], each.stream),
        ` ${each.of} ${nameOf(each)} of `,
        placeOf(each), make("span", "soft",
          `: ${[each.status, each.why].filter(Boolean).join("; ")}`)));
    const all = said.reduce((sum, [name, count]) => sum + (name === "exact" ? 0 : count), 0);
    if (all > doubtful.length) doubtful.push(
        make("li", "", `and ${number(all - doubtful.length)} more`));
    $("doubtful").replaceChildren(...doubtful);
    $("doubtful-box").hidden = !doubtful.length;
  }

  showRanks({ ranks, more_ranks: more }) {
    const sizes = ranks.map(({ blocks }) =>
        TIERS.reduce((all, tier) => all + (blocks?.[tier] ?? 0), 0));
    const most = Math.max(1, ...sizes);
    const mostRequests = Math.max(1, ...ranks.flatMap(({ requests }) => requests ?? []));
    const left = new Set(this.ranks.keys());
    for (const rank of ranks) {
      const key = JSON.stringify([rank.model_name, rank.tenant_id, rank.worker_id, rank.dp_rank]);
      left.delete(key);
      if (!this.ranks.has(key)) {
        this.ranks.set(key, new RankRow(rank));
        $("ranks").append(this.ranks.get(key).element);
      }
      this.ranks.get(key).show(rank, most, mostRequests);
    }
    for (const key of left) {
      this.ranks.get(key).element.remove();
      this.ranks.delete(key);
    }
    say($("rank-count"),
        more ? `the first ${number(ranks.length)} ranks` : counted(ranks.length, "rank"));
    $("rank-filter-line").hidden = ranks.length < 2;
    this.head.hidden = !ranks.length;
    this.filter();
  }

  filter() {
    const wanted = $("rank-filter").value.trim().toLowerCase();
    for (const row of this.ranks.values()) row.element.hidden = !row.text.includes(wanted);
  }

  showDecisions(decisions) {
    const head = make("div", "choice head",
        ...["ago", "request", "worker", "cached of prompt", "cost"]
      .map((text) => make("div", "", text)));
    const rows = decisions.map((each) => {
      const prompt = each.cached_tokens + each.prefill_tokens;
      const bar = new Stack();
      bar.show({ device: each.cached_tokens }, prompt);
      const said = `${number(each.cached_tokens)} of ${number(prompt)} tokens`;
      const cost = make("div", "", number(each.cost, 2),
          make("span", "soft", ` among ${each.candidates}`));
      cost.dataset.name = "cost";
      cost.title =
          `${each.candidates} candidates; ${number(each.queued_tokens)} tokens were queued there`;
      return make("div", "choice", make("div", "soft", `${number(each.age_s)} s`),
        make("div", "", requestOf(each)),
        make("div", "", make("strong", "", nameOf(each)), " ", make("span", "soft", placeOf(each))),
        make("div", "tokens", bar.element, make("span", "soft", said)), cost);
    });
    const none = make("p", "soft", "No choice since somebody began to look.");
    $("decisions").replaceChildren(...(rows.length ? [head, ...rows] : [none]));
  }

  showFaces(faces) {
    $("faces").replaceChildren(...faces.map(({ name, addresses, requests }) => {
      const where = addresses.flatMap((address, at) => {
        const [, tls, host] = FACE_PAGES.exec(address) ?? [];
        const link = make(host ? "a" : "span", "", address);
        const there = host?.replace(EVERYWHERE, location.hostname);
        if (there) link.href = `${tls ? "https" : "http"}://${there}/ui`;
        return at ? [", ", link] : [link];
      });
      const item = make("li", "", make("strong", "", name), " ", ...where);
      item.append(make("span", "soft", `, ${number(requests)} requests`));
      return item;
    }));
  }
}
