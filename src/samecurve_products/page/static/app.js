/** The shell of the live pages: which page the address names, navigation, colours, trouble. */

import { el, fill, themeSwitch } from "/page/dom.js";
import { read } from "./api.js";
import { ComparePage } from "./compare.js";
import { DataPage } from "./data.js";
import { sentence } from "./fields.js";
import { MachinePage } from "./machine.js";
import { NewRunPage } from "./new_run.js";
import { RunPage } from "./run.js";
import { RunsPage } from "./runs.js";

const pages = {
  new: NewRunPage, data: DataPage, runs: RunsPage, run: RunPage, compare: ComparePage,
  machine: MachinePage,
};
const main = document.getElementById("main");
const menu = document.getElementById("menu");
const trouble = document.getElementById("trouble");
let shown = null;

/**
 * What a page gets.
 *
 * failed(error or null): show or hide the line of trouble. state(): the machine, asked for once.
 */
const app = {
  failed(error) {
    const words = error && sentence(error.words ?? error.message);
    if (trouble.textContent !== (words ?? "")) fill(trouble, words);
    trouble.hidden = !words;
  },
  state() {
    this.known ??= read("/api/state").catch((error) => {
      this.known = null;
      throw error;
    });
    return this.known;
  },
};

function show() {
  const [path, query = ""] = (location.hash || "#/runs").slice(2).split("?");
  const [name, id] = path.split("/");
  const Page = pages[name] ?? RunsPage;
  shown?.stop();
  app.failed(null);
  shown = new Page(app, { id, query: new URLSearchParams(query) });
  fill(main, shown.element);
  document.title = `${shown.title} · Samecurve`;
  const current = name === "run" ? "runs" : name;
  for (const link of document.querySelectorAll("#pages a")) {
    const isCurrent = link.hash === `#/${current}`;
    link.toggleAttribute("data-current", isCurrent);
    if (isCurrent) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  openMenu(false);
  scrollTo(0, 0);
  shown.start();
}

function openMenu(open) {
  menu.setAttribute("aria-expanded", String(open));
  document.body.classList.toggle("menu-open", open);
}

function signedOut() {
  shown?.stop();
  app.failed(null);
  fill(main, el("section", { class: "empty" }, el("h1", {}, "This page needs its key"),
    el("p", {}, "Open the address that ", el("code", {}, "samecurve ui"), " printed in its "
      + "terminal; it holds a token that works once. If it has been used, start ",
    el("code", {}, "samecurve ui"), " again: no run is touched by that.")));
}

async function describeMachine() {
  const { detected, host } = await app.state();
  const place = document.getElementById("detected");
  fill(place, detected.split(":")[0]);
  place.title = [host, detected].filter(Boolean).join(" · ");
}

document.getElementById("theme").append(themeSwitch((theme) => {
  try {
    localStorage.setItem("samecurve-theme", theme);
  } catch {
    // The choice lasts as long as the page.
  }
}));
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
menu.addEventListener("click", () => openMenu(menu.getAttribute("aria-expanded") !== "true"));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") openMenu(false);
});
document.addEventListener("signed-out", signedOut);
addEventListener("hashchange", show);
describeMachine().catch(app.failed);
show();
