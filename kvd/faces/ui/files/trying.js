// Tries a route: shows its description from the OpenAPI document, an example to edit, the answer.

import { read, send } from "./asking.js";
import { $, make, number, say } from "./drawing.js";
import { explanation } from "./explaining.js";

const MOST_SHOWN = 200000; // characters of an answer
const TOKENS = 64; // token ids of an example

// Returns a value as JSON for people, with the numbers of an array on one line.
function written(value) {
  const text = JSON.stringify(value, null, 2);
  return text.replace(/\[\s+(-?[\d.e+-]+(?:,\s+-?[\d.e+-]+)*)\s+\]/g, (_, numbers) =>
    `[${numbers.replace(/\s+/g, " ")}]`);
}

export class Trying {
  constructor() {
    this.opening = null; // the promise of the document, once it has been asked for
    this.operations = [];
    this.known = {}; // values for members of a body, from the picture
    $("try-route").addEventListener("change", () => this.choose());
    $("try-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
  }

  show({ models, ranks }) {
    const [first] = [...models, ...ranks];  // the slot tracker's ranks may have no index
    if (first) {
      const { model_name, tenant_id, block_size = 16 } = first;
      this.known = { model_name, tenant_id, block_size, model: model_name };
    }
  }

  // Reads the document once, however often it is called: a second reading would undo the choice of
  // a route. After a failure, the next call reads again.
  open() {
    this.opening ??= this.load().catch((error) => {
      this.opening = null;
      throw error;
    });
    return this.opening;
  }

  async load() {
    const document = await read("openapi.json");
    this.operations = Object.entries(document.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, said]) =>
          ({ path, method: method.toUpperCase(), said })))
      .filter(({ path }) => !path.startsWith("/ui"));
    $("try-route").replaceChildren(...this.operations.map(({ path, method }, at) => {
      const option = make("option", "", `${method} ${path}`);
      option.value = at;
      return option;
    }));
    this.choose();
  }

  choose() {
    const { method, said } = this.operations[$("try-route").value];
    const scopes = (said.security ?? []).flatMap((each) => each.bearer ?? []);
    say($("try-summary"), `${said.summary}.${scopes.length ? ` Scope ${scopes.join(", ")}.` : ""}`);
    $("try-parameters").replaceChildren(...(said.parameters ?? []).map((each) => {
      const input = make("input");
      input.name = each.name;
      input.required = Boolean(each.required);
      input.value = each.required ? (this.known[each.name] ?? "") : "";
      input.dataset.place = each.in;
      return make("label", "", `${each.name}${each.required ? "" : " (optional)"} `, input);
    }));
    const content = said.requestBody?.content?.["application/json"];
    $("try-body-line").hidden = !content;
    $("try-body").value = content ? written(this.example(content.schema)) : "";
    say($("try-note"),
        method === "GET" || scopes[0] === "read" ? "" : "This may change what kvd knows.");
    $("try-answer").hidden = true;
  }

  // Returns a value that a schema allows: one that this kvd has, else the smallest.
  example(schema, name = "") {
    if (schema.example !== undefined) return schema.example;
    if (schema.const !== undefined) return schema.const;
    if (schema.enum) return schema.enum[0];
    if (schema.anyOf && !schema.properties) return this.example(schema.anyOf[0], name);
    if (this.known[name] !== undefined) return this.known[name];
    if (schema.type === "object") {
      const { properties = {}, required = [], anyOf: [first] = [] } = schema;
      const needed = [...required, ...(first?.required ?? [])];
      const wanted = Object.keys(properties).filter((each) =>
        needed.includes(each) || each in this.known ||
        each === "token_ids" || each === "messages");
      return Object.fromEntries(wanted.map((each) => [each, this.example(properties[each], each)]));
    }
    if (schema.type === "array") {
      if (/token|ids/.test(name)) return Array.from({ length: TOKENS }, (_, at) => at + 1);
      return [this.example(schema.items ?? {}, "")];
    }
    if (schema.type === "integer" || schema.type === "number")
        return Math.max(1, schema.minimum ?? 1);
    if (schema.type === "boolean") return false;
    return schema.type === "string" ? "text" : {};
  }

  async send() {
    const { path, method } = this.operations[$("try-route").value];
    const asked = new URLSearchParams();
    const headers = {};
    let where = path;
    for (const input of $("try-parameters").querySelectorAll("input")) {
      if (input.dataset.place === "path") {
        where = where.replace(`{${input.name}}`, encodeURIComponent(input.value));
      } else if (input.value && input.dataset.place === "header") headers[input.name] = input.value;
      else if (input.value) asked.set(input.name, input.value);
    }
    const options = { method, headers };
    if (!$("try-body-line").hidden) {
      options.body = $("try-body").value;
      headers["content-type"] = "application/json";
    }
    const query = asked.size ? `?${asked}` : "";
    const begun = performance.now();
    try {
      const answer = await send(where.slice(1) + query, options);
      const text = await answer.text();
      const took = number(performance.now() - begun);
      this.answer(
          `${answer.status} ${answer.statusText}, ${took} ms, ${number(text.length)} characters`,
          text);
      if (path === "/explain" && answer.ok)
          $("try-tables").replaceChildren(...explanation(JSON.parse(text)));
    } catch (error) {
      this.answer("No answer", error.message);
    }
  }

  answer(status, text) {
    let shown = text;
    $("try-tables").replaceChildren();
    try {
      shown = written(JSON.parse(text));
    } catch {
      // Not JSON: it is shown as it came.
    }
    say($("try-status"), status);
    const rest = shown.length > MOST_SHOWN ? "\n…" : "";
    say($("try-text"), shown.slice(0, MOST_SHOWN) + rest);
    $("try-answer").hidden = false;
  }
}
