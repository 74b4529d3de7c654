// The page: reads the picture every EVERY_MS and shows the view that the address names.

import { Refused, read, setToken } from "./asking.js";
import { $, say } from "./drawing.js";
import { Doctor } from "./examining.js";
import { Live } from "./live.js";
import { Tree } from "./tree.js";
import { Trying } from "./trying.js";

const EVERY_MS = 2000; // between two pictures
const VIEWS = ["live", "tree", "doctor", "try"];

const live = new Live();
const tree = new Tree();
const doctor = new Doctor();
const trying = new Trying();
let picture = null; // the last one
let timer = 0;

function view() {
  const named = location.hash.slice(1);
  return VIEWS.includes(named) ? named : "live";
}

function showView() {
  for (const name of VIEWS) $(name).hidden = name !== view();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view()}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (picture) showPicture();
}

function showPicture() {
  say($("version"), picture.kvd.version);
  trying.show(picture);
  if (view() === "live") live.show(picture);
  if (view() === "tree") tree.show(picture);
  if (view() === "doctor") doctor.open();
  if (view() === "try") trying.open().catch(failed);
}

function state(text, kind) {
  say($("state"), text);
  $("state").className = kind;
}

function failed(error) {
  if (error instanceof Refused) {
    state(error.message, "bad");
    askToken(error.message);
  } else {
    state(`kvd does not answer, trying again: ${error.message}`, "bad");
  }
}

function askToken(why) {
  if ($("token-dialog").open) return;
  const hint =
      "One of scope read shows everything here. It stays in this tab and is forgotten with it.";
  say($("token-why"), why ? `${why}. ${hint}` : hint);
  $("token").value = "";
  $("token-dialog").showModal();
}

async function look() {
  clearTimeout(timer);
  if (!document.hidden) {
    try {
      picture = await read("picture");
      state("live", "good");
      showPicture();
    } catch (error) {
      failed(error);
    }
  }
  clearTimeout(timer);
  // No request is sent while the dialog waits for a token.
  if (!$("token-dialog").open) timer = setTimeout(look, EVERY_MS);
}

$("token-open").addEventListener("click", () => askToken(""));
$("token-form").addEventListener("submit", () => setToken($("token").value.trim()));
$("token-dialog").addEventListener("close", look);
window.addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) look();
});
showView();
look();
