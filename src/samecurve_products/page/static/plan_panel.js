/** The plan beside the form: what will happen, why, how fast, and the equal command line. */

import { PageContext, renderBlocks } from "/page/blocks.js";
import { el, fill } from "/page/dom.js";
import { formatSeconds } from "/page/numbers.js";
import { tell } from "./dialogs.js";

/** Shows answers of /api/plan. While a new one is computed the last one stays, marked as old. */
export class PlanPanel {
  constructor() {
    this.context = new PageContext([]);
    this.status = el("p", { class: "plan-status quiet", role: "status" });
    this.brief = el("button", { type: "button", class: "brief", title: "Show the plan",
      onclick: () => this.lead() });
    this.errors = el("div", { role: "alert" });
    this.plan = el("div");
    this.command = el("pre", { class: "wrap", tabindex: 0 });
    this.copy = el("button", { type: "button", onclick: () => this.copyCommand() }, "Copy");
    this.unsaved = el("p", { class: "quiet" }, "That file is not there yet: ",
      "Save as YAML writes it, and so do Queue and Start.");
    this.commandPart = el("section", { hidden: true }, el("div", { class: "command-head" },
      el("h3", {}, "The same on a command line"), this.copy), this.command, this.unsaved);
    this.worlds = el("div");
    this.content = el("div", { class: "plan-content" }, this.plan, this.worlds, this.commandPart);
    this.element = el("aside", { class: "plan", "aria-label": "Plan" },
      el("div", { class: "plan-head" }, el("h2", {}, "The plan"), this.status), this.errors,
      this.content);
  }

  destroy() {
    this.context.destroy();
  }

  /** Lead to the field with an error, or else to the plan. */
  lead() {
    const field = document.querySelector(".run-form [aria-invalid='true']");
    if (field) field.focus();
    else this.element.scrollIntoView({ block: "start" });
  }

  waiting() {
    this.content.classList.add("outdated");
    this.content.setAttribute("aria-busy", "true");
    this.say("planning …");
  }

  /** others: the errors that no field of the form shows. */
  show(answer, others) {
    const { ok, notes = [], blocks = [], worlds = [], command, unsaved, seconds } = answer;
    this.content.removeAttribute("aria-busy");
    this.showErrors(others);
    if (!ok && !blocks.length) {
      this.say("the plan is not possible as it is", "bad");
      return;
    }
    this.content.classList.remove("outdated");
    this.say(seconds ? `planned in ${formatSeconds(seconds)}` : "planned");
    this.draw("plan", [...notes.map((text) => ({ type: "text", tone: "quiet", text })), ...blocks]);
    this.draw("worlds", worlds);
    this.context.keepOnly([...blocks, ...worlds]);
    this.commandPart.hidden = !command;
    this.unsaved.hidden = !unsaved;
    fill(this.command, command ?? "");
  }

  /** The request failed: it is no answer about the run. */
  fail(error) {
    this.content.removeAttribute("aria-busy");
    this.say("the plan could not be made", "bad");
    this.showErrors(error.errors ?? [{ cause: error.message, remedy: "" }]);
  }

  say(words, tone = "quiet") {
    fill(this.status, words);
    fill(this.brief, el("span", { class: tone }, words[0].toUpperCase() + words.slice(1)));
  }

  showErrors(errors) {
    const text = JSON.stringify(errors);
    if (text === this.shownErrors) return;
    this.shownErrors = text;
    fill(this.errors, renderBlocks(errors.map(({ cause, remedy }) => {
      return { type: "text", tone: "bad", title: cause, text: remedy };
    }), this.context));
  }

  draw(part, blocks) {
    const text = JSON.stringify(blocks);
    this.drawn ??= {};
    if (this.drawn[part] === text) return;
    this.drawn[part] = text;
    fill(this[part], renderBlocks(blocks, this.context));
  }

  async copyCommand() {
    try {
      await navigator.clipboard.writeText(this.command.textContent);
      tell("The command is copied");
    } catch {
      getSelection().selectAllChildren(this.command);
      tell("The browser allows no copying here. The command is selected: press Ctrl+C", "warn");
    }
  }
}
