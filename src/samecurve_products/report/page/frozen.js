/** A report in one file: the page's data lie in the file itself. */

import { RunColumns } from "./arrays.js";
import { PageContext, renderBlocks } from "./blocks.js";
import { el, themeSwitch } from "./dom.js";

/** Draw the page that the element `page` holds: {page, foot, made_by}. */
export function showFrozenPage() {
  const { page, foot, made_by: madeBy } = JSON.parse(document.getElementById("page").textContent);
  const runs = page.runs.map(({ name, colour, columns: sent }) => {
    const run = new RunColumns(name, colour);
    run.update(sent);
    return run;
  });
  const context = new PageContext(runs);
  const main = el("main", { id: "main" }, renderBlocks(page.blocks, context));
  addEventListener("beforeprint", () => context.charts.forEach((chart) => chart.show(true)));
  document.title = page.title;
  document.body.classList.add("frozen");
  document.body.append(el("div", { class: "frozen-top" }, themeSwitch()), main,
    el("footer", { class: "quiet" }, el("p", {}, foot), el("p", {}, madeBy)));
}

showFrozenPage();
