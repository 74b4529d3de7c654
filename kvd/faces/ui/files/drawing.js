// Elements, curves and bars. Texts are never parsed as HTML: they have names that clients chose.

const SVG = "http://www.w3.org/2000/svg";
export const TIERS = ["device", "host", "disk", "external"];

export const $ = (id) => document.getElementById(id);

// Makes an element with a class and children, texts or elements.
export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Sets a text only if it differs, so that a selection in it survives.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function number(value, digits = 0) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

// Returns a number and its noun.
export function counted(value, noun) {
  return `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function share(value) {
  return value === null || value === undefined ? "–" : `${Math.round(value * 100)}%`;
}

export function lastOf(values) {
  return values?.findLast((value) => value !== null) ?? null;
}

// A curve over time that ends at the right edge, with gaps where nothing was known.
export class Curve {
  constructor(points, title) {
    this.points = points;
    this.under = draw("path", { class: "under" });
    this.line = draw("path");
    this.element = draw(
      "svg",
      { class: "curve", viewBox: `0 0 ${points - 1} 20`, preserveAspectRatio: "none", role: "img" },
      draw("title", {}, title), this.under, this.line,
    );
  }

  show(values = [], most = 0) {
    const top = Math.max(most, ...values.filter((value) => value !== null), 1e-9);
    const first = this.points - values.length;
    let line = "", under = "", from = null, to = null;
    const close = () => {
      if (from !== null) under += `L${to} 20L${from} 20Z`;
      from = null;
    };
    values.forEach((value, at) => {
      if (value === null) return close();
      const x = first + at, y = (19 - (18 * value) / top).toFixed(2);
      const step = from === null ? "M" : "L";
      line += `${step}${x} ${y}`;
      if (from === null && values[at + 1] === null) line += `h.6`; // alone: a dot
      under += `${step}${x} ${y}`;
      from ??= x;
      to = x;
    });
    close();
    this.line.setAttribute("d", line);
    this.under.setAttribute("d", under);
  }
}

// A bar with a part for each tier; the rest of `whole` is free.
export class Stack {
  constructor() {
    this.title = draw("title");
    this.parts = [...TIERS, "free"].map((tier) =>
      draw("rect", { class: `tier-${tier}`, y: 0, height: 10 }));
    this.element = draw(
      "svg", { class: "stack", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img" },
      this.title, ...this.parts,
    );
  }

  show(blocks, whole) {
    const sum = TIERS.reduce((all, tier) => all + (blocks[tier] ?? 0), 0);
    const most = Math.max(whole, sum, 1);
    const sizes = [...TIERS.map((tier) => blocks[tier] ?? 0), most - sum];
    let x = 0;
    sizes.forEach((size, at) => {
      const width = (1000 * size) / most;
      this.parts[at].setAttribute("x", x.toFixed(1));
      this.parts[at].setAttribute("width", width.toFixed(1));
      x += width;
    });
    const said = TIERS.filter((tier) => blocks[tier])
        .map((tier) => `${tier} ${number(blocks[tier])}`);
    say(this.title, said.join(", ") || "nothing held");
  }
}

export function tierKey() {
  return TIERS.map((tier) => make("span", "key", make("i", `tier-${tier}`), tier));
}
