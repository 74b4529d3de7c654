// The prefix tree, walked branch by branch: a level is read when its branch is opened.

import { read } from "./asking.js";
import { $, TIERS, counted, draw, make, number, tierKey } from "./drawing.js";

const WIDEST = 24; // rem, of the longest bar
const FULL = 1024; // blocks of the longest chain that kvd keeps in one piece

export class Tree {
  constructor() {
    this.shown = null; // the model that is shown
    this.models = [];
    $("tiers").append(...tierKey());
    $("tree-model").addEventListener("change", () => this.begin());
    $("tree-again").addEventListener("click", () => this.begin());
  }

  // Takes the models of a picture; begins anew if kvd has restarted, as names of branches changed.
  show({ kvd, models }) {
    const names = JSON.stringify(models.map(({ model_name, tenant_id, block_size }) =>
      [model_name, tenant_id, block_size]));
    if (names === this.names && kvd.process === this.process) return;
    const chosen = $("tree-model").value;
    const anew = kvd.process !== this.process || this.shown === null;
    Object.assign(this, { names, models, process: kvd.process });
    $("tree-model").replaceChildren(...models.map((model, at) => {
      const option = make("option", "",
        `${model.model_name} / ${model.tenant_id}, blocks of ${model.block_size} tokens`);
      option.value = JSON.stringify([model.model_name, model.tenant_id, model.block_size]);
      option.selected = option.value === chosen || (!chosen && at === 0);
      return option;
    }));
    if (anew || chosen !== $("tree-model").value) this.begin();
  }

  begin() {
    const box = $("branches");
    if (!$("tree-model").value) {
      this.shown = null;
      box.replaceChildren(make("p", "soft", "Nothing is held yet."));
      return;
    }
    const [model_name, tenant_id, block_size] = JSON.parse($("tree-model").value);
    this.shown = { model_name, tenant_id, block_size };
    const list = make("ul", "branches");
    box.replaceChildren(list);
    this.fill(list, null, null);
  }

  // Appends a page of the branches below `above` to a list.
  async fill(list, above, after) {
    const asked = new URLSearchParams({ ...this.shown });
    if (above) asked.set("above", above);
    if (after) asked.set("after", after);
    const waits = list.appendChild(make("li", "soft", "reading"));
    try {
      const { branches, more, block_size: size } = await read(`branches?${asked}`);
      waits.remove();
      list.append(...branches.map((branch) => this.branch(branch, size)));
      if (!branches.length && !after) list.append(make("li", "soft", "Nothing is held here now."));
      if (more) list.append(this.more(list, above, branches.at(-1).name));
    } catch (error) {
      waits.textContent = `${error.message}: the tree has changed, read it again`;
    }
  }

  more(list, above, after) {
    const button = make("button", "", "More");
    button.type = "button";
    const item = make("li", "", button);
    button.addEventListener("click", () => {
      item.remove();
      this.fill(list, above, after);
    });
    return item;
  }

  branch(branch, size) {
    const said = counted(branch.blocks * size, "token");
    const name = make("span", "name", make("strong", "", said),
      make("span", "soft",
        ` ${counted(branch.blocks, "block")}, ${branch.name.slice(-16, -8)}…`));
    const run = make("span", "run", name, this.bar(branch), this.holders(branch));
    const item = make("li", "branch");
    item.dataset.branch = branch.name;
    if (!branch.children) {
      item.append(make("div", "line", run));
      return item;
    }
    name.append(make("span", "soft", `, ${number(branch.children)} go on`));
    const opened = make("details", "line", make("summary", "", run));
    opened.addEventListener("toggle", () => {
      if (!opened.open || opened.dataset.read) return;
      opened.dataset.read = "yes";
      const list = opened.appendChild(make("ul", "branches"));
      this.fill(list, branch.name, null);
    });
    item.append(opened);
    return item;
  }

  bar(branch) {
    // The width is the square root of the length, so that short runs are seen beside long ones.
    const width = WIDEST * Math.sqrt(Math.min(1, branch.blocks / FULL));
    const svg = draw("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none" },
      draw("rect", { width: 100, height: 10, rx: 1 }));
    svg.style.width = `${Math.max(0.6, width).toFixed(1)}rem`;
    return svg;
  }

  holders(branch) {
    const cells = [];
    for (const tier of TIERS.filter((each) => branch.tiers[each])) {
      const { count, holders } = branch.tiers[tier];
      for (const each of holders) {
        const name = each.worker_id === null ? "publisher" : `${each.worker_id}:${each.dp_rank}`;
        const width = Math.max(2, (100 * each.blocks) / branch.blocks);
        cells.push(make("span", "holder", make("span", "", name),
          draw("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img" },
            draw("title", {}, `${name} holds ${each.blocks} of ${branch.blocks} blocks on ${tier}`),
            draw("rect", { class: "tier-free", width: 100, height: 10 }),
            draw("rect", { class: `tier-${tier}`, width, height: 10 }))));
      }
      if (count > holders.length) {
        cells.push(make("span", "soft", `and ${number(count - holders.length)} more on ${tier}`));
      }
    }
    return make("span", "holders", ...cells);
  }
}
