// What keeps prompts from matching: the findings of GET /diagnose.

import { read } from "./asking.js";
import { $, make, say } from "./drawing.js";

const TIMEOUT_MS = 30000; // kvd probes engines for ten seconds at most

export class Doctor {
  constructor() {
    this.asked = false;
    $("doctor-again").addEventListener("click", () => this.examine());
  }

  // Examines when the view is opened for the first time.
  open() {
    if (!this.asked) this.examine();
  }

  async examine() {
    this.asked = true;
    const button = $("doctor-again");
    button.disabled = true;
    say($("doctor-said"), "examining");
    try {
      const asked = $("doctor-probe").checked ? "diagnose?probe=1" : "diagnose";
      const { findings } = await read(asked, { signal: AbortSignal.timeout(TIMEOUT_MS) });
      const count = findings.length;
      say($("doctor-said"),
          count ? `${count} ${count === 1 ? "finding" : "findings"}` : "Nothing is wrong.");
      $("findings").replaceChildren(...findings.map(sheet));
    } catch (error) {
      say($("doctor-said"), error.message);
    } finally {
      button.disabled = false;
    }
  }
}

function sheet({ name, severity, subject, evidence, remedy }) {
  const kind = make("span", severity === "error" ? "bad" : "fair", severity);
  const heading = make("h2", "", name, " ", make("small", "", kind, ` ${subject}`));
  return make("article", `sheet finding ${severity}`,
      heading, make("p", "", evidence), make("pre", "", remedy));
}
